"""A page whose slots between sinks and recent window are stored in 8 or 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.fields import owned
from kvsketch.cache.kind import Kind
from kvsketch.cache.middle import Middle
from kvsketch.cache.page import Page
from kvsketch.cache.ragged import picked
from kvsketch.cache.storage import Bits
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State, name_of


class QuantizedPage:
    """The first ``sink`` slots, the last ``recent`` slots and the appended slots of every head are
    stored unchanged on a ``Page``, and the slots between them in a ``Middle``.

    Args:
        slots: the slots of every head come first, as for ``Page``. Dead slots do not affect the
            precision of the others.
        sizes: the number of slots of each head, int64 ``[batch, heads]``. None: all the same.
        room: slots that can be appended to every head.
        bits: of keys and of values, 8 or 4.
        sink: slots at the start that are stored unchanged.
        recent: slots at the end that are stored unchanged.
        previous: the page from which these slots were read with ``exactly``. Slots that have not
            changed keep their bits.

    Attributes:
        sizes: as given.
        exact: the sinks, recent window and appended slots of each head, in this order.
        middle: the slots between sinks and recent window. None: no head has any.
    """

    def __init__(
        self,
        slots: Slots,
        sizes: Tensor | None,
        room: int,
        bits: Bits,
        sink: int,
        recent: int,
        previous: QuantizedPage | None = None,
    ) -> None:
        self.sizes, self._base = sizes, slots.count
        every = sizes
        if every is None:
            every = torch.full(slots.keys.shape[:2], slots.count, device=slots.keys.device)
        first = every.clamp(max=sink)
        last = (every - first).clamp(max=recent)
        between = every - first - last
        self._first = first.unsqueeze(-1)
        self._dtype: torch.dtype = slots.keys.dtype if previous is None else previous._dtype
        kept, hidden = int((first + last).max()), int(between.max())
        column = torch.arange(max(kept, hidden), device=first.device)
        own, skipped = column[:kept], between.unsqueeze(-1)
        place = torch.where(own < self._first, own, own + skipped)
        exact = slots.take(place.clamp(max=slots.count - 1))
        exact = replace(exact, keys=exact.keys.to(self._dtype))
        if exact.mass is None:
            exact = replace(exact, values=exact.values.to(self._dtype))
        same = bool((first + last == kept).all())
        self.exact = Page(exact, None if same else first + last, room)
        self.middle: Middle | None = None
        self._kept = kept
        if hidden:
            place = (column[:hidden] + self._first).clamp(max=slots.count - 1)
            before = None if previous is None else previous.middle
            self.middle = Middle(slots.take(place), between, bits, before)

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.exact.batch

    @property
    def heads(self) -> int:
        """The number of KV heads."""
        return self.exact.heads

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
        return self.exact.held.to(self.middle.sizes.device) + self.middle.sizes

    @property
    def slots(self) -> Slots:
        """All slots, as ``Page.slots``, in their original dtype."""
        return self.read()

    def read(self, exactly: bool = False) -> Slots:
        """As ``slots``. With ``exactly``, in at least float32, so that the stored numbers are not
        rounded to the model's dtype."""
        dtype = compute_dtype(self._dtype) if exactly else self._dtype
        exact = self.exact.slots
        exact = replace(
            exact,
            keys=exact.keys.to(dtype),
            values=exact.values.to(torch.promote_types(exact.values.dtype, dtype)),
        )
        if self.middle is None:
            return exact
        middle = self.middle.read(dtype)
        if exact.mass is not None or middle.mass is not None:  # value-sums
            wide = compute_dtype(dtype)
            exact, middle = (replace(s, values=s.values.to(wide)) for s in (exact, middle))
        together, (index, there) = Slots.cat([exact, middle]), self._order()
        return together.take(index) if self.sizes is None else picked(together, index, there)

    def _order(self) -> tuple[Tensor, Tensor]:
        """For each slot of ``slots``, in order, its number among those of ``exact`` followed by
        those of ``middle``, int64 ``[batch, heads, count]``, and whether it exists, bool."""
        assert self.middle is not None
        held, first = self.held.unsqueeze(-1), self._first
        number = torch.arange(self.count, device=first.device) - (self.count - held)
        before = self.exact.count - (held - self.middle.sizes.unsqueeze(-1))
        behind = number - self.middle.sizes.unsqueeze(-1)
        index = torch.where(behind >= first, before + behind, self.exact.count + number - first)
        index = torch.where(number < first, before + number, index)
        there = number >= 0
        return torch.where(there, index, 0), there

    def open(self) -> list[Page | Middle]:
        """The parts over which attention is computed. The newest tokens are in the last part."""
        return [self.exact] if self.middle is None else [self.middle, self.exact]

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]``, unchanged, after the slots of every head."""
        self.exact.append(new)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` slots of every head, which must be appended ones."""
        self.exact.drop(tokens)

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the tokens that were just appended are not padding, bool ``[batch, q]``."""
        self.exact.mark_last(live)

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

    def grown(self, room: int) -> QuantizedPage:
        """A page with the same slots and ``room`` for more."""
        twin = copy.copy(self)
        twin.exact = self.exact.grown(room)
        return twin

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = copy.copy(self)
        twin.exact, twin._first = self.exact.map(fn), fn(self._first)
        if self.middle is not None:
            twin.middle = self.middle.map(lambda t: owned(fn(t)))
        if self.sizes is not None:
            twin.sizes = fn(self.sizes)
        return twin

    def to_state(self) -> State:
        """All slots, and the room after them."""
        state = State(values={"base": self._base, "kept": self._kept})
        state.values["dtype"] = name_of(self._dtype)
        state.keep(first=self._first, sizes=self.sizes)
        state.put("exact", self.exact.to_state())
        state.put("middle", None if self.middle is None else self.middle.to_state())
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind) -> QuantizedPage:
        """Restore the result of ``to_state``.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        page, heads = cls.__new__(cls), (kind.batch, kind.heads)
        page._base, page._kept = reader.whole("base", 1), reader.whole("kept")
        page._dtype = reader.dtype("dtype")
        page.exact = Page.from_state(reader.part("exact"), kind)
        page._first = reader.integers("first", (*heads, 1), 0, page._kept)
        page.sizes = page.middle = None
        if reader.has("sizes"):
            page.sizes = reader.integers("sizes", heads, 0, page._base)
        if reader.has("middle"):
            page.middle = Middle.from_state(reader.part("middle"), kind)
        held, grown = page.held, page.exact.count - page._kept
        every = page._base if page.sizes is None else page.sizes
        own = page.exact.held - grown  # sinks and recent window
        fits = grown >= 0 and bool((held - grown == every).all())
        if not fits or bool((own < page._first.squeeze(-1)).any()):
            raise reader.wrong("base", page._base, "the slots of the parts together")
        reader.close()
        return page

    def release(self) -> None:
        """Release temporary tensors after the attention over the page was computed."""
        self.exact.release()

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = self.exact.tensors()
        return held if self.middle is None else [*held, *self.middle.tensors()]
