"""A page of sketches and of the exact tokens before and after them, without copies of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.page.kind import Kind
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.part_state import part_state, restored
from kvsketch.slots import Slots
from kvsketch.state import Reader, State, numbered


class SketchGroup(NamedTuple):
    """Heads with one sketch.

    Attributes:
        exact: their exact tokens, first those before the tokens in the sketch.
        first: how many these are.
        window: has the sketch. None: there is none yet, and all tokens are exact.
    """

    exact: Part
    first: int
    window: WindowedSketch | None

    @property
    def tokens(self) -> Slots:
        """The exact tokens, in their dtype."""
        return _in_one_dtype(self.exact.slots)

    @property
    def slots(self) -> Slots:
        """All slots over which attention is computed, in the order of the tokens."""
        exact = self.tokens
        if self.window is None or self.window.sketch is None:
            return exact
        last = exact.narrow(self.first, exact.count - self.first)
        return Slots.cat([exact.narrow(0, self.first), self.window.sketch.slots, last])

    @property
    def size(self) -> int:
        """Slots of a head. The sketch counts as the number of tokens that fit into its bytes."""
        return self.exact.count + (0 if self.window is None else self.window.worth)


class SketchPage:
    """Sinks, a sketch, then recent and appended tokens, with the verbs of ``Page``.

    A sketch has the same size for all of its heads: heads with different budgets are in groups,
    each with a sketch of its own and its heads as rows. The slots that attention reads are computed
    from the state of the sketches; they exist until ``release`` and are counted by ``tensors``.

    Args:
        groups: one, or one for each budget.
        places: the heads of each group, int64 ``[R]``, ``row * heads + head``; every head is in one
            group. None: one group has all heads as they are, and its window is the stream's, which
            acts on it.
        shape: batch and heads.
    """

    sizes: Tensor | None = None
    compressed = True
    middle: None = None  # its exact tokens are in one part

    def __init__(
        self,
        groups: Sequence[SketchGroup],
        places: Sequence[Tensor] | None,
        shape: tuple[int, int],
    ) -> None:
        self.groups = list(groups)
        self.places = None if places is None else list(places)
        self.batch, self.heads = shape
        self._opened: Slots | None = None

    @classmethod
    def after(
        cls,
        before: Page | SketchPage,
        tokens: Slots,
        method: WindowedSketch,
        budgets: HeadBudgets,
        budget: int | Tensor,
        limit: int | Tensor,
        room: int,
    ) -> SketchPage:
        """The page after the tokens between sinks and recent window went into the sketches.

        Args:
            before: the layer's page; unless it has sketches, ``tokens`` is what it held.
            method: the stream's window, from which those of groups are made (``fresh``).
            budgets: of every head.
            budget: what exact tokens and sketch may take after this, in tokens: one number, or
                int64 ``[batch, heads]``.
            limit: the budgets now, likewise.
            room: tokens that can be appended above these.
        """
        shape = tokens.keys.shape[0], tokens.keys.shape[1]
        if before.groups:
            places = before.places
            exact = [group.tokens for group in before.groups]
            windows = [group.window for group in before.groups]
        else:
            places = None if isinstance(budget, int) else _by_budget(budgets, shape[0])
            exact = _split(_in_one_dtype(tokens), places)
            windows = [None] * len(exact)
        made = []
        for number, (part, window) in enumerate(zip(exact, windows, strict=True)):
            if places is None:
                assert isinstance(budget, int)
                assert isinstance(limit, int)
                made.append(_next(method, part, budget, limit, room))
                continue
            mine, each = places[number], torch.as_tensor(limit, device="cpu").flatten()
            if window is None:
                window = method.fresh()
                window.number_rows(mine)
            own = int(torch.as_tensor(budget, device="cpu").flatten()[mine[0]])
            made.append(_next(window, part, own, int(each[mine[0]]), room))
        return cls(made, places, shape)

    @property
    def appended(self) -> int:
        """The number of tokens appended to every head."""
        return max(group.exact.appended for group in self.groups)

    @property
    def room(self) -> int:
        """The number of tokens that can still be appended."""
        return min(group.exact.room for group in self.groups)

    @property
    def count(self) -> int:
        """The number of slots of the largest head."""
        return max(group.size for group in self.groups)

    @property
    def held(self) -> Tensor:
        """The number of slots of every row and head, int64 ``[batch, heads]``."""
        held = torch.zeros(self.batch * self.heads, dtype=torch.int64, device="cpu")
        for number, group in enumerate(self.groups):
            held[slice(None) if self.places is None else self.places[number].cpu()] = group.size
        return held.view(self.batch, self.heads)

    @property
    def slots(self) -> Slots:
        """The slots of all heads, with dead slots before those of smaller heads."""
        parts = [group.slots for group in self.groups]
        if self.places is None:
            return parts[0]
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

    def open(self) -> Slots:
        """The slots, for attention to read."""
        if self._opened is None:
            self._opened = self.slots
        return self._opened

    def release(self, lookups: bool = False) -> None:
        """Release the slots after the attention over the page was computed."""
        self._opened = None

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]`` after the exact tokens."""
        for group, part in zip(self.groups, _split(new, self.places), strict=True):
            group.exact.append(part)
        self._opened = None

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens, which must be appended ones."""
        for group in self.groups:
            group.exact.drop(tokens)
        self._opened = None

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the tokens that were just appended are not padding, bool ``[batch, q]``."""
        for number, group in enumerate(self.groups):
            own = live
            if self.places is not None:
                own = live.index_select(0, self.places[number] // self.heads)
            group.exact.mark_last(own)
        self._opened = None

    def set_score(self, score: Tensor) -> None:
        """A sketch has no scores."""

    def grown(self, room: int) -> SketchPage:
        """A page with the same tokens and ``room`` for more."""
        groups = [group._replace(exact=group.exact.grown(room)) for group in self.groups]
        return SketchPage(groups, self.places, (self.batch, self.heads))

    def scored(self) -> list[Part]:
        """Nothing: a sketch has no scores."""
        return []

    def number_rows(self, rows: Tensor) -> None:
        """Say which rows of another batch these are (int64 ``[batch]``); the stream's own window
        is told by the stream."""
        for group, places in zip(self.groups, self.places or (), strict=False):
            if group.window is not None:
                at = places.cpu()
                group.window.number_rows(rows[at // self.heads] * self.heads + at % self.heads)

    def to_score(self, values: bool) -> Slots:
        """As ``Page.to_score``."""
        return self.slots

    def map(self, fn: Callable[[Tensor], Tensor]) -> SketchPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied, and the sketches of
        groups."""
        source = fn(torch.arange(self.batch, device="cpu"))
        shape = (len(source), self.heads)
        if self.places is None:
            (group,) = self.groups
            return SketchPage([group._replace(exact=group.exact.map(fn))], None, shape)
        every = source.unsqueeze(1) * self.heads + torch.arange(self.heads, device="cpu")
        every = every.flatten()
        groups, places = [], []
        for group, mine in zip(self.groups, self.places, strict=True):
            local = torch.full((self.batch * self.heads,), -1, device="cpu")
            local[mine.cpu()] = torch.arange(len(mine), device="cpu")
            rows = (local[every] >= 0).nonzero().flatten()
            if not len(rows):
                continue
            index = local[every][rows]

            def some(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(0, index.to(tensor.device))

            if group.window is not None:
                group.window.map_batch(some)
                group.window.number_rows(rows)
            groups.append(group._replace(exact=group.exact.map(some)))
            places.append(rows.to(mine.device))
        return SketchPage(groups, places, shape)

    def to_state(self) -> State:
        """The exact tokens and the sketch of every group, and its heads."""
        state = State(values={"count": len(self.groups)})
        parts = []
        for exact, first, window in self.groups:
            part = State(values={"first": first})
            part.put("exact", part_state(exact))
            part.put("window", None if window is None else window.to_state())
            parts.append(part)
        state.put("groups", numbered(parts))
        state.keep(**{f"places{i}": places for i, places in enumerate(self.places or ())})
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind, method: WindowedSketch) -> SketchPage:
        """Restore the result of ``to_state``.

        Args:
            method: the stream's empty window.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        total = kind.batch * kind.heads
        count, places = reader.whole("count", 1, total), None
        if reader.has("places0"):
            places = [reader.integers(f"places{i}", (None,), 0, total - 1) for i in range(count)]
        every = [] if places is None else torch.cat(places).tolist()
        if sorted(every) != list(range(total)) and (places is not None or count > 1):
            raise reader.wrong("places", count, "groups that have every head once")
        groups = []
        for number, part in enumerate(reader.parts("groups", count)):
            own = kind if places is None else kind.rows(len(places[number]))
            exact = restored(part.part("exact"), own)
            if exact.packed or exact.sizes is not None:
                raise part.wrong("exact", exact.base, "exact tokens, of every head as many")
            group = SketchGroup(exact, part.whole("first", 0, exact.base), None)
            if part.has("window"):
                window = method if places is None else method.fresh()
                window.restore(part.part("window"), group.tokens)
                group = group._replace(window=window)
            part.close()
            groups.append(group)
        reader.close()
        return cls(groups, places, (kind.batch, kind.heads))

    def tensors(self) -> list[Tensor]:
        """All tensors except those of the stream's own window, for byte counting."""
        held = [] if self._opened is None else list(self._opened.tensors().values())
        for group in self.groups:
            held += group.exact.tensors()
            if self.places is not None and group.window is not None:
                held += group.window.tensors()
        return held


def _next(method: WindowedSketch, exact: Slots, budget: int, limit: int, room: int) -> SketchGroup:
    """The exact tokens and the sketch after those between sinks and recent window went into it
    (``WindowedSketch.take``), with room for what fits into ``limit`` and ``room`` tokens more."""
    parts = method.take(exact, budget)
    if parts is None:
        return SketchGroup(Part(exact, None, max(limit - exact.count, 0) + room), exact.count, None)
    first, last = parts
    count = first.count + method.worth + last.count
    held = Part(Slots.cat([first, last]), None, max(limit, count) + room - count)
    return SketchGroup(held, first.count, method)


def _by_budget(budgets: HeadBudgets, batch: int) -> list[Tensor]:
    """The heads of each budget, as places in the batch."""
    rows = budgets.rows if budgets.by_row else budgets.rows * batch
    every = [one for row in rows for one in row]
    return [
        torch.tensor([i for i, one in enumerate(every) if one == alike], device="cpu")
        for alike in dict.fromkeys(every)
    ]


def _split(slots: Slots, places: Sequence[Tensor] | None) -> list[Slots]:
    """The heads of each group as rows, ``[R, 1, ...]``."""
    if places is None:
        return [slots]
    flat = slots.map(lambda t: t.flatten(0, 1).unsqueeze(1))
    return [flat.map(lambda t, i=i: t.index_select(0, i)) for i in places]  # type: ignore[misc]


def _in_one_dtype(slots: Slots) -> Slots:
    """Slots that are tokens, some of them dead, with values in the dtype of the keys, in which a
    sketch keeps its state."""
    return replace(slots, values=slots.values.to(slots.keys.dtype))
