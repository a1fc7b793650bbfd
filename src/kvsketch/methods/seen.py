"""Observed queries beside the slots they attended to, for methods that fit to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from kvsketch.estimator import check_queries
from kvsketch.observed import Observed
from kvsketch.slots import Slots


@dataclass(frozen=True)
class Seen(Observed):
    """Queries and all slots they attended to, one row for each KV head that is compressed: R rows
    of ``[R, group, q, head_dim]`` queries, with slopes and sinks ``[R, group]``.

    Attributes:
        slots: ``[R, 1, n, ...]``, scored, sinks and recent tokens included.
        fit: whether slots may be fitted to the queries, see ``Compressor.compress``.
        others: as in ``Observed``.
    """

    slots: Slots = field(kw_only=True)
    fit: bool = field(default=True, kw_only=True)

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
            observed.scaling,
            observed.softcap,
            by_head(observed.slopes),
            None if observed.live is None else observed.live.repeat_interleave(heads, 0),
            by_head(observed.sinks),
            observed.after,
            slots=slots.map(lambda t: t.flatten(0, 1).unsqueeze(1)),
            fit=fit,
        )

    def select(self, rows: Tensor) -> Seen:
        """Some of the rows. ``rows``: int64 ``[R']``."""

        def some(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows)

        optional = (self.slopes, self.sinks, self.live)
        slopes, sinks, live = (None if t is None else some(t) for t in optional)
        queries, slots = some(self.queries), self.slots.map(some)
        return replace(self, queries=queries, slots=slots, slopes=slopes, sinks=sinks, live=live)
