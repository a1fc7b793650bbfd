"""The page of a layer: its slots in one part, or in two where most are stored in few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.page.kind import Kind
from kvsketch.page.memory import narrowed, rows_of, store
from kvsketch.page.part import Part
from kvsketch.page.part_state import part_state, restored
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.ragged import picked
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State


class Page:
    """All slots of a layer, in the order of their tokens.

    In few bits, the first ``sink`` slots, the last ``recent`` slots and the appended slots of every
    head stay exact, and the slots between them are a part of their own.

    Args:
        slots: as for ``Part``. Dead slots do not affect the precision of the others.
        sizes: the number of slots of each head, int64 ``[batch, heads]``. None: all the same.
        room: slots that can be appended to every head.
        bits: of keys and of values.
        sink: in few bits, slots at the start that stay exact.
        recent: in few bits, slots at the end that stay exact.
        previous: the page of these slots before, which must not be used afterwards.
        apart: the slots between sinks and recent ones are a part of their own in any bits.

    Attributes:
        sizes: as given.
        exact: exact slots; in few bits, the sinks, recent window and appended slots of each head.
        middle: the slots between sinks and recent window, in few bits. None: there are none.
    """

    middle: Part | None = None
    _first: Tensor | None = None  # sinks of every head, before the middle

    def __init__(
        self,
        slots: Slots,
        sizes: Tensor | None = None,
        room: int = 0,
        bits: Bits = FULL,
        sink: int = 0,
        recent: int = 0,
        previous: Page | None = None,
        apart: bool = False,
    ) -> None:
        self.sizes, self._base = sizes, slots.count
        dtype = slots.keys.dtype if previous is None else previous.dtype
        if bits == FULL and not apart:
            self._kept = slots.count
            if previous is None or previous.middle is not None:
                self.exact = Part(slots, sizes, room, dtype=dtype)
            else:
                self.exact = previous.exact.refilled(slots, sizes, room, dtype)
            return
        every = sizes
        if every is None:
            every = torch.full(slots.keys.shape[:2], slots.count, device=slots.keys.device)
        first = every.clamp(max=sink)
        last = (every - first).clamp(max=recent)
        between = every - first - last
        self._kept, hidden = int((first + last).max()), int(between.max())
        column = torch.arange(max(self._kept, hidden), device=first.device)
        own, first = column[: self._kept], first.unsqueeze(-1)
        place = torch.where(own < first, own, own + between.unsqueeze(-1))
        exact = slots.take(place.clamp(max=slots.count - 1))
        same = bool((every - between == self._kept).all())
        self.exact = Part(exact, None if same else every - between, room, dtype=dtype)
        if hidden:
            place = (column[:hidden] + first).clamp(max=slots.count - 1)
            before = None if previous is None else previous.middle
            same = bool((between == hidden).all())
            of_head = None if same else between
            self.middle = Part(slots.take(place), of_head, 0, bits, before, dtype)
            self._first = first

    @classmethod
    def of_tokens(cls, slots: Slots) -> Page:
        """The tokens of a context that is not compressed, see ``Part``."""
        return cls.of_parts(Part.of_tokens(slots))

    @classmethod
    def of_parts(cls, exact: Part, middle: Part | None = None) -> Page:
        """A page whose parts are there already, such as those in an engine's memory."""
        page = cls.__new__(cls)
        page.sizes, page._base, page._kept = None, 0, 0
        page.exact, page.middle = exact, middle
        return page

    def rows(self, rows: Tensor, window: int, sink: int, recent: int, between: int) -> Page:
        """Copies of some rows, all alike, of pages in an engine's memory (``Layout.views``).

        Args:
            rows: int64 ``[rows]``.
            window: exact slots of each head.
            sink, recent: of these, the ones around the middle.
            between: slots of each head in the middle, or as many as it has room for.
        """
        exact = rows_of(self.exact, rows, window)
        if self.middle is None or not between:
            return Page.of_parts(exact)
        page = Page.of_parts(exact, narrowed(rows_of(self.middle, rows), between))
        assert page.middle is not None
        exact.base, exact.appended = sink + recent, window - sink - recent
        held = page.middle.held.to(rows.device)
        page._kept, page._base = sink + recent, sink + recent + page.middle.count
        page._first = torch.full((*held.shape, 1), sink, device=rows.device)
        if page.middle.sizes is not None:
            page.sizes = held + (sink + recent)
        return page

    def with_parts(self, exact: Part, middle: Part) -> Page:
        """A page with as many sinks and recent tokens as this one, and other parts."""
        page = Page.of_parts(exact, middle)
        page._first, page._kept = self._first, self._kept
        page._base = self._kept + middle.count
        page.sizes = None if middle.sizes is None else middle.sizes + self._kept
        return page

    def store(self, new: Page, rows: Tensor) -> None:
        """Write a page into some rows of pages in an engine's memory, int64 ``[rows]``."""
        store(self.exact, new.exact, rows)
        if self.middle is not None and new.middle is not None:
            store(self.middle, new.middle, rows)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tokens."""
        return self.exact.fields["keys"].dtype

    @property
    def compressed(self) -> bool:
        """Whether a compression has made it, not the tokens of a context."""
        return not self.exact.grows

    @property
    def appended(self) -> int:
        """The number of slots appended to every head."""
        return self.exact.appended

    @property
    def room(self) -> int:
        """The number of slots that can still be appended."""
        return self.exact.room

    @property
    def count(self) -> int:
        """The number of slots of the largest head."""
        return self._base + self.exact.count - self._kept

    @property
    def held(self) -> Tensor:
        """The number of slots of every row and head, int64 ``[batch, heads]``."""
        if self.middle is None:
            return self.exact.held
        middle = self.middle.held
        return self.exact.held.to(middle.device) + middle

    @property
    def slots(self) -> Slots:
        """All slots, as ``Part.read`` returns them, in the dtype of the tokens."""
        return self.read()

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens that are not compressed, padding included."""
        return self.exact.even("keys"), self.exact.even("values")

    #: of heads with a sketch of their own, see ``SketchPage``: none
    groups: Sequence[Any] = ()
    places: None = None

    def number_rows(self, rows: Tensor) -> None:
        """Nothing: a page draws no random numbers, see ``SketchPage``."""

    def to_score(self, values: bool) -> Slots:
        """All slots, for a method that scores them; without ``values``, these may be missing."""
        return self.exact.keys_alone if self.middle is None and not values else self.slots

    def read(self, exactly: bool = False) -> Slots:
        """As ``slots``. With ``exactly``, in at least float32, so that the stored numbers are not
        rounded to the model's dtype."""
        dtype = compute_dtype(self.dtype) if exactly else self.dtype
        if self.middle is None:
            return self.exact.read(dtype)
        exact, middle = self.exact.read(dtype), self.middle.read(dtype)
        if exact.mass is not None or middle.mass is not None:  # value-sums
            wide = compute_dtype(dtype)
            exact, middle = (replace(s, values=s.values.to(wide)) for s in (exact, middle))
        together, (index, there) = Slots.cat([exact, middle]), self._order()
        return together.take(index) if self.sizes is None else picked(together, index, there)

    def _order(self) -> tuple[Tensor, Tensor]:
        """For each slot of ``slots``, in order, its number among those of ``exact`` followed by
        those of ``middle``, int64 ``[batch, heads, count]``, and whether it exists, bool."""
        assert self.middle is not None
        assert self._first is not None
        first = self._first
        held, between = (t.held.to(first.device).unsqueeze(-1) for t in (self, self.middle))
        number = torch.arange(self.count, device=first.device) - (self.count - held)
        before = self.exact.count - (held - between)  # dead slots of the exact part
        start = self.exact.count + self.middle.count - between  # of the middle's own slots
        behind = number - between
        index = torch.where(behind >= first, before + behind, start + number - first)
        index = torch.where(number < first, before + number, index)
        there = number >= 0
        return torch.where(there, index, 0), there

    def open(self) -> list[Part]:
        """The parts over which attention is computed. The newest tokens are in the last part."""
        return [self.exact] if self.middle is None else [self.middle, self.exact]

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]``, unchanged, after the slots of every head."""
        self.exact.append(new)

    def newest(self, tokens: int) -> Slots:
        """Copies of the last tokens of every head, which no compression has touched, without marks
        of padding."""
        fields = {name: tensor.clone() for name, tensor in self.exact.last(tokens).items()}
        fields.pop("log_mass", None)
        return Slots(**fields)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` slots of every head, as ``Part.drop``."""
        self.exact.drop(tokens)

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the last tokens are not padding, bool ``[batch, q]``."""
        self.exact.mark_last(live)

    def scored(self) -> list[Part]:
        """``open()``, of parts that have scores which may be written into."""
        parts = self.open()
        for part in parts:
            part.own_score()
        return parts

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots, ``[batch, heads, count]``."""
        if self.middle is None:
            self.exact.set_score(score)
            return
        index, there = self._order()
        shape = (*score.shape[:2], self.exact.count + self.middle.count)
        apart = score.new_zeros(shape).scatter_add_(2, index, torch.where(there, score, 0.0))
        self.exact.set_score(apart[:, :, : self.exact.count])
        self.middle.set_score(apart[:, :, self.exact.count :])

    def grown(self, room: int) -> Page:
        """A page with the same slots and ``room`` for more."""
        twin = copy.copy(self)
        twin.exact = self.exact.grown(room)
        return twin

    def map(self, fn: Callable[[Tensor], Tensor]) -> Page:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = copy.copy(self)
        twin.exact = self.exact.map(fn)
        if self.middle is not None and self._first is not None:
            twin.middle, twin._first = self.middle.map(fn), fn(self._first)
        if self.sizes is not None:
            twin.sizes = fn(self.sizes)
        return twin

    def to_state(self) -> State:
        """All slots, and the room after them."""
        state = State(values={"base": self._base, "kept": self._kept})
        state.keep(first=self._first, sizes=self.sizes)
        state.put("exact", part_state(self.exact))
        state.put("middle", None if self.middle is None else part_state(self.middle))
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind) -> Page:
        """Restore the result of ``to_state``.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        page, heads = cls.__new__(cls), (kind.batch, kind.heads)
        page._base, page._kept = reader.whole("base"), reader.whole("kept")
        page.exact = restored(reader.part("exact"), kind)
        page.sizes = None
        if reader.has("sizes"):
            page.sizes = reader.integers("sizes", heads, 0, page._base)
        if reader.has("middle"):
            page.middle = restored(reader.part("middle"), kind)
            page._first = reader.integers("first", (*heads, 1), 0, page._kept)
        if page.exact.packed or (page.middle is not None and not page.middle.packed):
            raise reader.wrong("middle", page.middle is not None, "the only part in few bits")
        held, grown = page.held, page.exact.count - page._kept
        every = page._base if page.sizes is None else page.sizes
        own = page.exact.held - grown  # sinks and recent window
        fits = grown >= 0 and bool(
            (held.cpu() - grown == torch.as_tensor(every, device="cpu")).all()
        )
        first = None if page._first is None else page._first.squeeze(-1).cpu()
        if not fits or (first is not None and bool((own.cpu() < first).any())):
            raise reader.wrong("base", page._base, "the slots of the parts together")
        reader.close()
        return page

    def release(self, lookups: bool = False) -> None:
        """Release temporary tensors after the attention over the page was computed, see
        ``Part.release``."""
        for part in self.open():
            part.release(lookups)

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return [tensor for part in self.open() for tensor in part.tensors()]
