"""A page of sketches and of the exact tokens before and after them, without copies of either."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.page.kind import Kind
from kvsketch.page.part import Part
from kvsketch.slots import Slots
from kvsketch.state import Reader, State, numbered


class SketchPage:
    """Sinks, a sketch, then recent and appended tokens. The slots that attention reads are computed
    from the state of the sketch. They exist until ``release`` and are counted by ``tensors``.

    Args:
        first: exact tokens before those in the sketch.
        window: has the sketch. None: there is no sketch yet, and all tokens are exact.
        last: exact tokens after those in the sketch.
        room: tokens that can be appended.
    """

    sizes: Tensor | None = None

    def __init__(self, first: Slots, window: WindowedSketch | None, last: Slots, room: int) -> None:
        self.window, self._first = window, first.count
        self.exact = Part(Slots.cat([first, last]), None, room)
        self._opened: Slots | None = None

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
        """The number of tokens appended to every head."""
        return self.exact.appended

    @property
    def room(self) -> int:
        """The number of tokens that can still be appended."""
        return self.exact.room

    @property
    def base(self) -> int:
        """As ``count``, without the appended tokens."""
        return self.count - self.appended

    @property
    def count(self) -> int:
        """The number of slots. The sketch counts as the number of tokens that fit into its
        bytes."""
        return self.exact.count + (0 if self.window is None else self.window.worth)

    @property
    def held(self) -> Tensor:
        """The number of slots of every row and head, int64 ``[batch, heads]``."""
        return torch.full((self.batch, self.heads), self.count)

    @property
    def tokens(self) -> Slots:
        """The exact tokens, in their dtype."""
        return tokens_of(self.exact.slots)

    @property
    def slots(self) -> Slots:
        """All slots over which attention is computed, in the order of the tokens."""
        exact = self.tokens
        if self.window is None or self.window.sketch is None:
            return exact
        last = exact.narrow(self._first, exact.count - self._first)
        return Slots.cat([exact.narrow(0, self._first), self.window.sketch.slots, last])

    def open(self) -> Slots:
        """The slots, for attention to read."""
        if self._opened is None:
            self._opened = self.slots
        return self._opened

    def release(self) -> None:
        """Release the slots after the attention over the page was computed."""
        self._opened = None

    def append(self, new: Slots) -> None:
        """Write ``new`` after the exact tokens."""
        self.exact.append(new)
        self._opened = None

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens, which must be appended ones."""
        self.exact.drop(tokens)
        self._opened = None

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the tokens that were just appended are not padding, bool ``[batch, q]``."""
        self.exact.mark_last(live)
        self._opened = None

    def set_score(self, score: Tensor) -> None:
        """A sketch has no scores."""

    def grown(self, room: int) -> SketchPage:
        """A page with the same tokens and ``room`` for more."""
        return self._around(self.exact.grown(room))

    def map(self, fn: Callable[[Tensor], Tensor]) -> SketchPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied. The owner of the window
        applies ``fn`` to the sketch."""
        return self._around(self.exact.map(fn))

    def _around(self, exact: Part) -> SketchPage:
        twin = copy.copy(self)
        twin.exact, twin._opened = exact, None
        return twin

    def to_state(self) -> State:
        """The exact tokens and the sketch."""
        state = State(values={"first": self._first})
        state.put("exact", self.exact.to_state())
        state.put("window", None if self.window is None else self.window.to_state())
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind, window: WindowedSketch) -> SketchPage:
        """Restore the result of ``to_state``.

        Args:
            window: an empty window, which receives the sketch.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        page = cls.__new__(cls)
        page.exact = Part.from_state(reader.part("exact"), kind)
        if page.exact.packed or page.exact.sizes is not None or not page.exact.base:
            raise reader.wrong("exact", page.exact.base, "exact tokens, of every head as many")
        page._first = reader.whole("first", 0, page.exact.base)
        page._opened, page.window = None, None
        if reader.has("window"):
            window.restore(reader.part("window"), page.tokens)
            page.window = window
        reader.close()
        return page

    def tensors(self) -> list[Tensor]:
        """All tensors except those of the sketch, for byte counting."""
        held = self.exact.tensors()
        return held if self._opened is None else [*held, *self._opened.tensors().values()]


class SketchPages:
    """Sketches of different size: one ``SketchPage`` for each budget, with its heads as rows.

    It has the methods of ``SketchPage``. They loop over groups of heads, because a sketch has the
    same size for all of its heads.

    Args:
        pages: one for each group.
        places: the heads of each group, int64 ``[R]``, ``row * heads + head``. Every head is in one
            group.
        shape: batch and heads.
    """

    def __init__(
        self, pages: Sequence[SketchPage], places: Sequence[Tensor], shape: tuple[int, int]
    ) -> None:
        self.pages, self.places = list(pages), list(places)
        self.batch, self.heads = shape

    @property
    def room(self) -> int:
        return min(page.room for page in self.pages)

    @property
    def appended(self) -> int:
        return max(page.appended for page in self.pages)

    @property
    def count(self) -> int:
        return max(page.count for page in self.pages)

    @property
    def base(self) -> int:
        return max(page.base for page in self.pages)

    @property
    def held(self) -> Tensor:
        held = torch.zeros(self.batch * self.heads, dtype=torch.int64)
        for page, places in zip(self.pages, self.places, strict=True):
            held[places.cpu()] = page.count
        return held.view(self.batch, self.heads)

    @property
    def sizes(self) -> Tensor:
        return self.held - self.appended

    @property
    def slots(self) -> Slots:
        """The slots of all heads, with dead slots before those of smaller heads."""
        return self._together([page.slots for page in self.pages])

    def open(self) -> Slots:
        """The slots, for attention to read."""
        return self._together([page.open() for page in self.pages])

    def _together(self, parts: Sequence[Slots]) -> Slots:
        count = max(part.count for part in parts)
        names = {name for part in parts for name in part.tensors()} | {"mass"}
        fields = {}
        for name in sorted(names):
            whole: Tensor | None = None
            for part, places in zip(parts, self.places, strict=True):
                field = part.masses() if name == "mass" else getattr(part, name)
                if whole is None:
                    shape = (self.batch * self.heads, count, *field.shape[3:])
                    whole = field.new_zeros(shape)
                whole[places, count - part.count :] = field.squeeze(1).to(whole.dtype)
            assert whole is not None
            fields[name] = whole.view(self.batch, self.heads, *whole.shape[1:])
        return Slots(**fields)

    def split(self, slots: Slots) -> list[Slots]:
        """The heads of each group as rows, ``[R, 1, ...]``."""
        flat = slots.map(lambda t: t.flatten(0, 1).unsqueeze(1))
        return [flat.map(lambda t, i=i: t.index_select(0, i)) for i in self.places]  # type: ignore[misc]

    def append(self, new: Slots) -> None:
        for page, part in zip(self.pages, self.split(new), strict=True):
            page.append(part)

    def drop(self, tokens: int) -> None:
        for page in self.pages:
            page.drop(tokens)

    def mark_last(self, live: Tensor) -> None:
        for page, places in zip(self.pages, self.places, strict=True):
            page.mark_last(live.index_select(0, places // self.heads))

    def set_score(self, score: Tensor) -> None:
        """A sketch has no scores."""

    def release(self) -> None:
        for page in self.pages:
            page.release()

    def grown(self, room: int) -> SketchPages:
        shape = (self.batch, self.heads)
        return SketchPages([page.grown(room) for page in self.pages], self.places, shape)

    def map(self, fn: Callable[[Tensor], Tensor]) -> SketchPages:
        """The pages, and the sketches in them, with ``fn`` (which acts on axis 0) applied."""
        source = fn(torch.arange(self.batch))
        every = source.unsqueeze(1) * self.heads + torch.arange(self.heads)
        every = every.flatten()
        pages, places = [], []
        for page, mine in zip(self.pages, self.places, strict=True):
            local = torch.full((self.batch * self.heads,), -1)
            local[mine.cpu()] = torch.arange(len(mine))
            rows = (local[every] >= 0).nonzero().flatten()
            if not len(rows):
                continue
            index = local[every][rows]

            def some(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(0, index.to(tensor.device))

            if page.window is not None:
                page.window.map_batch(some)
                page.window.number_rows(rows)
            pages.append(page.map(some))
            places.append(rows.to(mine.device))
        return SketchPages(pages, places, (len(source), self.heads))

    def to_state(self) -> State:
        """The state of every page, and the heads on it."""
        state = State(values={"count": len(self.pages)})
        state.put("pages", numbered([page.to_state() for page in self.pages]))
        state.keep(**{f"places{i}": places for i, places in enumerate(self.places)})
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind, method: WindowedSketch) -> SketchPages:
        """Restore the result of ``to_state``.

        Args:
            method: a window from which those of the groups are made (``fresh``).

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        total = kind.batch * kind.heads
        count = reader.whole("count", 1, total)
        places = [reader.integers(f"places{i}", (None,), 0, total - 1) for i in range(count)]
        if sorted(torch.cat(places).tolist()) != list(range(total)):
            raise reader.wrong("places", count, "groups that have every head once")
        pages = [
            SketchPage.from_state(part, kind.rows(len(mine)), method.fresh())
            for part, mine in zip(reader.parts("pages", count), places, strict=True)
        ]
        reader.close()
        return cls(pages, places, (kind.batch, kind.heads))

    def tensors(self) -> list[Tensor]:
        held = [tensor for page in self.pages for tensor in page.tensors()]
        for page in self.pages:
            held += [] if page.window is None else page.window.tensors()
        return held


def next_page(
    method: WindowedSketch, exact: Slots, budget: int, limit: int, room: int
) -> SketchPage:
    """Add the tokens between sinks and recent window to the sketch (``WindowedSketch.take``), and
    make a page around it.

    Args:
        exact, budget: as for ``take``.
        limit: the number of tokens whose bytes may be in use before the next compression.
        room: tokens in addition to ``limit``.
    """
    parts = method.take(exact, budget)
    if parts is None:
        empty = exact.narrow(0, 0)
        return SketchPage(exact, None, empty, max(limit, exact.count) + room - exact.count)
    first, last = parts
    count = first.count + method.worth + last.count
    return SketchPage(first, method, last, max(limit, count) + room - count)


def by_budget(
    method: WindowedSketch,
    budgets: HeadBudgets,
    before: SketchPages | Slots,
    budget: Tensor,
    limit: Tensor,
    room: int,
) -> SketchPages:
    """The next pages of heads with different budgets. Heads with the same budget share a sketch.

    Args:
        method: a window from which those of the groups are made (``fresh``).
        budgets: the budget of every head.
        before: the pages so far, or all tokens if nothing was compressed yet.
        budget: slots after this compression, int64 ``[batch, heads]``.
        limit: the current budgets, in the same dtype and shape, or one number.
        room: as for ``next_page``.
    """
    batch, heads = budget.shape
    if isinstance(before, SketchPages):
        places = before.places
        windows = [page.window or method.fresh() for page in before.pages]
        parts = [page.tokens for page in before.pages]
    else:
        rows = budgets.rows if budgets.by_row else budgets.rows * batch
        every = [one for row in rows for one in row]
        places = [
            torch.tensor([i for i, one in enumerate(every) if one == alike])
            for alike in dict.fromkeys(every)
        ]
        windows = [method.fresh() for _ in places]
        for window, mine in zip(windows, places, strict=True):
            window.number_rows(mine)
        flat = before.map(lambda t: t.flatten(0, 1).unsqueeze(1))
        parts = [flat.map(lambda t, i=i: t.index_select(0, i)) for i in places]  # type: ignore[misc]
    limits = limit.flatten()
    made = [
        next_page(window, part, int(budget.flatten()[mine[0]]), int(limits[mine[0]]), room)
        for window, part, mine in zip(windows, parts, places, strict=True)
    ]
    return SketchPages(made, places, (batch, heads))


def tokens_of(slots: Slots) -> Slots:
    """Slots that are tokens, some of them dead, with values in the dtype of the keys, in which a
    sketch keeps its state."""
    return replace(slots, values=slots.values.to(slots.keys.dtype))
