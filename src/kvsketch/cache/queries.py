"""Queries of a layer that are not yet included in scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.observed import Observed
from kvsketch.page.kind import Kind
from kvsketch.state import FLOATS, Reader, State

#: Decoded queries wait until there are this many: larger groups take less time, smaller ones less
#: memory.
FOLD_EVERY = 32


class Queries:
    """The queries of a layer's newest tokens that no score includes yet, in the order of the
    tokens."""

    def __init__(self) -> None:
        self._waiting: list[Observed] = []
        self.count = 0

    def add(self, observed: Observed) -> None:
        """Append the queries of the newest tokens."""
        self._waiting.append(observed)
        self.count += observed.queries.shape[2]

    def all(self) -> Observed | None:
        """All of them, concatenated; None if there are none."""
        return joined(self._waiting) if self._waiting else None

    @property
    def after(self) -> bool:
        """Whether they come after all tokens and belong to none of them."""
        return bool(self._waiting) and self._waiting[0].after

    def clear(self) -> None:
        """Remove them."""
        self._waiting, self.count = [], 0

    def keep_last(self, count: int) -> None:
        """Keep only the last ``count`` and release the memory of the others. Queries of a second
        reading are kept: they are a sample of it and attend to all tokens."""
        if self.count <= count or self.after:
            return
        last = self.last(count)
        self.clear()
        if last is not None:
            self.add(last)

    def last(self, count: int) -> Observed | None:
        """A copy of the last ``count``, or of all if there are fewer; None if there are none."""
        together, count = self.all(), min(count, self.count)
        if together is None or not count:
            return None
        live = None if together.live is None else together.live[:, -count:].clone()
        queries = together.queries[:, :, -count:].clone()
        return replace(together, queries=queries, live=live)

    def many(self, row_bytes: int) -> bool:
        """Whether decoded queries should be turned into scores now."""
        return bool(self.count) and self.count >= self.most(row_bytes, self._waiting[0].queries)

    def most(self, row_bytes: int, queries: Tensor) -> int:
        """How many queries become scores together: ``FOLD_EVERY``, or fewer so that those of a row
        are at most 2% of the bytes held beside them. By the bytes of one row, so that every row of
        a batch has the scores that it would have alone."""
        each = queries[0, :, :1].nbytes
        return max(1, min(FOLD_EVERY, int(0.02 * row_bytes / each)))

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch."""
        self._waiting = [observed.map_batch(fn) for observed in self._waiting]

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return [observed.queries for observed in self._waiting]

    def to_state(self) -> State | None:
        """The waiting queries, concatenated; None if there are none."""
        together = self.all()
        return None if together is None else observed_state(together)

    def restore(self, reader: Reader, kind: Kind) -> None:
        """Restore the result of ``to_state``."""
        self.add(read_observed(reader, kind))


def observed_state(observed: Observed) -> State:
    """Queries, with the settings that turn them into scores."""
    values = {"scaling": observed.scaling, "softcap": observed.softcap, "after": observed.after}
    state = State(values=values)
    names = ("queries", "slopes", "live", "sinks", "weights", "total")
    state.keep(**{name: getattr(observed, name) for name in names})
    return state


def read_observed(reader: Reader, kind: Kind) -> Observed:
    """What ``observed_state`` said.

    Raises:
        InputError: inconsistent tensors.
    """
    floats = tuple(FLOATS.values())
    queries = reader.tensor("queries", (kind.batch, None, None, kind.key_dim), *floats)
    _, heads, count, _ = queries.shape
    if not heads or heads % kind.heads or not count:
        raise reader.wrong("queries", tuple(queries.shape), f"of {kind.heads} KV heads' groups")
    softcap = reader.anything("softcap")
    if softcap is not None and (type(softcap) is not float or not softcap > 0):
        raise reader.wrong("softcap", softcap, "null or a number > 0")
    rows, each = (kind.batch, count), (heads,)
    shapes = {"slopes": each, "sinks": each, "weights": rows, "total": (kind.batch, heads, count)}
    found = {
        name: reader.tensor(name, shape, *floats, allow=("inf",))
        for name, shape in shapes.items()
        if reader.has(name)
    }
    live = reader.tensor("live", rows, torch.bool) if reader.has("live") else None
    scaling, after = reader.number("scaling"), reader.flag("after")
    reader.close()
    return Observed(queries, scaling, softcap=softcap, live=live, after=after, **found)


def joined(observed: Sequence[Observed]) -> Observed:
    """Queries of successive tokens as one."""
    if len(observed) == 1:
        return observed[0]
    queries = torch.cat([o.queries for o in observed], dim=2)
    live = None
    if any(o.live is not None for o in observed):
        live = torch.cat([_live_queries(o) for o in observed], dim=1)
    return replace(observed[0], queries=queries, live=live)


def side_by_side(observed: Sequence[Observed], kv_heads: int) -> Observed | None:
    """The queries of layers that share keys, as more query heads of each KV head. Later layers may
    have those of the last tokens of a prompt alone (Gemma 4): the first layer's stand for those
    that are missing."""
    if len(observed) < 2:
        return observed[0] if observed else None
    every = observed[0].queries
    observed = [
        replace(o, queries=torch.cat([every[:, :, : -o.queries.shape[2]], o.queries], dim=2))
        if o.queries.shape[2] < every.shape[2]
        else o
        for o in observed
    ]

    def beside(parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
        present = [
            part.reshape(*part.shape[:axis], kv_heads, -1, *part.shape[axis + 1 :])
            for part in parts
            if part is not None
        ]
        if len(present) < len(parts):
            return None
        return torch.cat(present, dim=axis + 1).flatten(axis, axis + 1)

    queries = beside([o.queries for o in observed], 1)
    assert queries is not None
    slopes, sinks = beside([o.slopes for o in observed], 0), beside([o.sinks for o in observed], 0)
    return replace(observed[0], queries=queries, slopes=slopes, sinks=sinks)


def _live_queries(observed: Observed) -> Tensor:
    queries = observed.queries
    if observed.live is not None:
        return observed.live
    return torch.ones(queries.shape[0], queries.shape[2], dtype=torch.bool, device=queries.device)
