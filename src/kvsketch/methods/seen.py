"""Observed queries beside the slots they attended to, for methods that fit to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from kvsketch.estimator import check_queries
from kvsketch.observed import Observed
from kvsketch.slots import Slots


@dataclass(frozen=True)
class Seen:
    """Queries and all slots they attended to, one row for each KV head that is compressed: R rows.

    Attributes:
        queries: ``[R, group, q, head_dim]``; query i of q sees the slots up to and including
            number ``slots.count - q + i`` (causal).
        slots: ``[R, 1, n, ...]``, scored, sinks and recent tokens included.
        scaling: as in ``Observed``, as are the others.
        softcap: of the scores, or None.
        slopes: ``[R, group]`` or None.
        sinks: ``[R, group]`` or None.
        live: bool ``[R, q]`` or None.
        after: as in ``Observed``: every query sees all slots.
        fit: whether slots may be fitted to the queries, see ``Compressor.compress``.
    """

    queries: Tensor
    slots: Slots
    scaling: float
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    live: Tensor | None = None
    after: bool = False
    fit: bool = True

    @staticmethod
    def of(slots: Slots, observed: Observed, fit: bool = True) -> Seen:
        """All KV heads, as views where that is possible: row ``batch * heads + head``.

        Raises:
            InputError: queries that do not fit the keys.
        """
        check_queries(observed.queries, slots, observed.slopes)
        batch, heads = slots.keys.shape[:2]

        def by_head(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers.view(heads, -1).repeat(batch, 1)

        return Seen(
            observed.queries.reshape(batch * heads, -1, *observed.queries.shape[2:]),
            slots.map(lambda t: t.flatten(0, 1).unsqueeze(1)),
            observed.scaling,
            observed.softcap,
            by_head(observed.slopes),
            by_head(observed.sinks),
            None if observed.live is None else observed.live.repeat_interleave(heads, 0),
            observed.after,
            fit,
        )

    def select(self, rows: Tensor) -> Seen:
        """Some of the rows. ``rows``: int64 ``[R']``."""

        def some(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows)

        return self._map(some, self.slots.map(some))

    def _map(self, fn: Callable[[Tensor], Tensor], slots: Slots) -> Seen:
        optional = (self.slopes, self.sinks, self.live)
        slopes, sinks, live = (None if t is None else fn(t) for t in optional)
        queries = fn(self.queries)
        return replace(self, queries=queries, slots=slots, slopes=slopes, sinks=sinks, live=live)

    @property
    def plain(self) -> bool:
        """Whether scores are products of queries and keys and nothing else."""
        return self.softcap is None and self.slopes is None
