"""The plan: how a budget is spent over layers and KV heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_tolerance
from ..budget import ALLOCATIONS, Budget, Schedule, scheduled
from ..errors import InputError, UnsupportedError
from ..slots import Observed, Slots
from .budgets import HeadBudgets
from .curves import Curves, held_out_for, least_tokens, measure_rows, of_layers, spend
from .error import QUERIES
from .needs import by_need
from .shard import Shard
from .stream import Stream
from .windowed_sketch import WindowedSketch

# Tokens that errors are measured on at most.
_MEASURED_TOKENS = 4096
# Peak of a prefill that the plan aims at, as a share of the exact cache, or so much above the least
# that is possible: one layer exact, the others compressed.
_PEAK, _SLACK = 0.5, 0.07
# A bound on a head is worth a compression where it takes away so much of what the head holds.
_WORTH = 0.9
#: Allocations that compare scores.
BY_NEED = ("layer", "global")
#: Of the average budget, what every head keeps at least where the heads of a layer compete: AdaKV's
#: alpha, as its authors and kvpress have it.
SAFEGUARD = 0.2


class Plan:
    """One of seven ways to spend a budget:

    - ``even``: the same budget for every head.
    - ``schedule``: shares of it, given per layer or per layer and head.
    - ``curves``: where errors fall most, by curves measured before on other prompts.
    - ``measured``: the same, by curves measured on this prompt.
    - ``layer``, ``global``: where the slots lie that matter most to the method, by its scores,
      among the heads of a layer (AdaKV) or of the model (KVzip).
    - ``tolerance``: the fewest slots that keep every head's error within it, by curves of either
      kind; on average no more than ``max_budget``.

    The cache owns the plan, and asks it to ``hand_down`` what follows when the attention of a layer
    is done.

    Args:
        kind: see above.
        budget: the average over layers and heads; None with a tolerance.
        schedule: as for ``scheduled``.
        curves: measured before.
        tolerance: of every head's relative error.
        max_budget: what a tolerance may cost on average; None: as much as it takes.
    """

    def __init__(
        self,
        kind: str,
        budget: Budget | None,
        schedule: Schedule | None = None,
        curves: Curves | None = None,
        tolerance: float | None = None,
        max_budget: Budget | None = None,
    ) -> None:
        self.kind, self.budget, self.schedule, self.curves = kind, budget, schedule, curves
        self.tolerance, self.max_budget = tolerance, max_budget
        self._layers, self._heads = 0, 0
        #: heads above the tolerance in any row, bool ``[heads]``, by layer
        self.above: dict[int, Tensor] = {}
        self._measured: dict[int, list[Curves]] = {}  # one per row
        self._scores: dict[int, Tensor] = {}  # by layer, [batch, heads, n]

    def begin(self, layers: int, heads: int) -> list[HeadBudgets | None]:
        """What is known before the first token: the budgets of every layer, None where they follow
        from the prompt.

        Args:
            layers: how many are compressed.
            heads: KV heads of the model. A layer that has fewer is one of a tensor-parallel rank:
                budgets are then spread over the heads of all ranks.

        Raises:
            InputError: a schedule or curves that do not fit.
        """
        self._layers, self._heads = layers, heads
        if self.curves is not None and tuple(self.curves.error.shape[:2]) != (layers, heads):
            found = self.curves.error.shape
            raise InputError(
                f"allocation: the curves are of {found[0]} layers x {found[1]} KV heads, the model "
                f"compresses {layers} x {heads}"
            )
        if self.kind not in ("even", "schedule"):
            return [None] * layers
        assert self.budget is not None
        every = scheduled(self.budget, self.schedule, layers, [heads] * layers)
        return [HeadBudgets([row]) for row in every]

    @property
    def measures(self) -> bool:
        """Whether it measures on the prompt, for which it takes the prompt's queries."""
        return self.kind in ("measured", "tolerance") and self.curves is None

    def queries_for(self, stream: Stream) -> int | None:
        """How many of a prompt's last queries are measured on; None: all of them."""
        window = stream.method.window
        if stream.needs_queries and window is None:
            return None
        return 128 + max(QUERIES, window or 0)

    def ready(self, stream: Stream, prefill: bool) -> bool:
        """Whether a layer that waits has enough tokens for its budget to be worked out."""
        if self.budget is not None and not self.budget.is_fraction:
            budget = self.budget.slots(stream.seen)
            above = 0 if prefill else stream.pace.buffer(budget)
            return stream.seen > budget and stream.seen >= budget + above
        return self.curves is not None or _measurable(stream)

    @torch.no_grad()
    def hand_down(
        self, stream: Stream, streams: Sequence[Stream], prefill: bool, hold: bool = False
    ) -> bool:
        """Work out what follows from the prompt of a stream that waits, and hand it down.

        Args:
            stream: one of ``streams``, those of all layers, in their order.
            prefill: as for ``Stream.settle``.
            hold: more of the prompt is to come.

        Returns:
            Whether any layer was compressed.
        """
        most = self.queries_for(stream)
        if most is not None and stream.queries.count > 2 * most:
            stream.queries.keep_last(most)
        if hold or not self.ready(stream, prefill):
            return False
        number = next(i for i, other in enumerate(streams) if other is stream)
        found = self._next_budgets(number, streams)
        for place, budget, provisional in found:
            streams[place].spend(budget, provisional)
        if stream.waits and stream.method.window is not None:
            stream.queries.keep_last(stream.method.window)  # it has been measured
        elif stream.waits and number in self._measured:
            stream.fold()  # all queries count, and scores are smaller
        return bool(found)

    def _next_budgets(
        self, number: int, streams: Sequence[Stream]
    ) -> list[tuple[int, HeadBudgets, bool]]:
        """What to hand down now that layer ``number`` has its prompt: layers, their budgets, and
        whether these are upper bounds that a later call replaces.

        What is measured on a prompt is for that prompt alone: every row of the batch gets its own
        budgets. Unless a layer's budgets follow from that layer alone, they follow from all: a
        layer that is measured is meanwhile compressed to what its heads may need at most
        (``_bounds``).
        """
        stream = streams[number]
        heads, rows = stream.slots.keys.shape[1], stream.slots.keys.shape[0]
        shard = Shard.of(heads, self._heads)
        bound = None if self.max_budget is None else self.max_budget.value
        if self.curves is not None:
            found, above = self._spent(self.curves, stream.seen)
            self._note_above(number, [above[number]], shard)
            own = HeadBudgets([shard.own(found[number])], bound=bound, measured=True)
            return [(number, own, False)]
        if not _measurable(stream):  # a number of slots, which may not be exceeded
            assert self.budget is not None
            return [(number, HeadBudgets([[self.budget] * heads]), False)]
        if self.kind in BY_NEED:
            return self._by_need(number, streams, shard)
        alone = self.kind == "tolerance" and self.max_budget is None
        self._measured[number] = measure(stream, None if alone else shard)
        if alone:
            told = [self._spent(curves, stream.seen) for curves in self._measured.pop(number)]
            self._note_above(number, [above[0] for _, above in told])
            return [(number, HeadBudgets([found[0] for found, _ in told], True), False)]
        numbers = sorted(self._measured)
        whole = [
            shard.whole(of_layers([self._measured[n][row] for n in numbers])) for row in range(rows)
        ]
        if len(numbers) < self._layers:
            return self._bounds(numbers, whole, streams, shard)
        held = torch.stack([streams[n].held for n in numbers], dim=1)  # [rows, layers, heads]
        told = [
            self._spent(curves, stream.seen, shard.whole_held(held[row]))
            for row, curves in enumerate(whole)
        ]
        self._measured = {}
        for place, n in enumerate(numbers):
            self._note_above(n, [above[place] for _, above in told], shard)
        return [
            (n, HeadBudgets([shard.own(found[place]) for found, _ in told], True, bound), False)
            for place, n in enumerate(numbers)
        ]

    def _by_need(
        self, number: int, streams: Sequence[Stream], shard: Shard
    ) -> list[tuple[int, HeadBudgets, bool]]:
        """Budgets by the scores of a layer, or of all once all have their prompt."""
        assert self.budget is not None
        if shard.ranks > 1:
            raise UnsupportedError(
                f"allocation={self.kind!r} compares the scores of all KV heads, of which this "
                "process holds a part; use 'even' or 'measured' with tensor parallelism"
            )
        stream = streams[number]
        self._scores[number] = stream.importance()
        if self.kind == "global" and len(self._scores) < self._layers:
            return []
        method, average = stream.method, self.budget.slots(stream.seen)
        safeguard = SAFEGUARD if self.kind == "layer" else 0.0
        numbers = sorted(self._scores)
        scores = [self._scores.pop(n) for n in numbers]
        told = [
            by_need([s[row] for s in scores], average, method.sink, method.recent, safeguard)
            for row in range(len(scores[0]))
        ]
        return [
            (
                n,
                HeadBudgets(
                    [
                        [Budget(self.budget.value, x / average) for x in found[place].tolist()]
                        for found in told
                    ],
                    True,
                ),
                False,
            )
            for place, n in enumerate(numbers)
        ]

    def _bounds(
        self, numbers: list[int], whole: list[Curves], streams: Sequence[Stream], shard: Shard
    ) -> list[tuple[int, HeadBudgets, bool]]:
        """Upper bounds for the layers measured so far: what these would get if they could spend all
        that keeps the peak of the prefill, with one more layer exact, where it should be."""
        tokens = streams[numbers[0]].seen
        most = self.budget or self.max_budget
        assert most is not None
        final = min(1.0, most.slots(tokens) / tokens)
        layers = self._layers
        peak = max(_PEAK, final + (1 - final) / layers + _SLACK)
        if isinstance(streams[numbers[0]].method, WindowedSketch):
            return []  # what a sketch took in cannot be compressed again
        allowed = (peak * layers - 1) / len(numbers)
        if allowed >= 1:
            return []
        # Towards what the layers to come will leave, so that few compressions are enough.
        kept = (allowed + max(final, (peak * layers - 1) / (layers - 1))) / 2
        method = streams[numbers[0]].method
        # The queries to come back to see this much more as it is, on top of what the bound is for.
        extra = max(0, (method.window or 0) - method.recent)
        window = min(tokens, method.sink + method.recent + 1)
        shares = [torch.tensor(c.allocate(max(kept, float(c.kept[0])))) * kept for c in whole]
        found = []
        for place, n in enumerate(numbers):
            held = streams[n].held
            own = [shard.own(share[place].tolist()) for share in shares]
            bound = (torch.tensor(own, dtype=torch.float64) * tokens).ceil().long()
            slots = (bound.clamp(min=window) + extra).clamp(max=tokens)
            # Head by head, so that a row of the batch decides nothing for another.
            slots = torch.where(slots > _WORTH * held, held, slots)
            rows = [[Budget(1.0, x / tokens) for x in row] for row in slots.tolist()]
            found.append((n, HeadBudgets(rows, True), True))
        return found

    def _spent(
        self, curves: Curves, tokens: int, held: Tensor | None = None
    ) -> tuple[list[list[Budget]], Tensor]:
        """The budget of every head of every layer, and which heads (bool ``[layers, heads]``) are
        kept above the tolerance by ``max_budget``.

        Args:
            curves: of all layers.
            tokens: seen.
            held: slots that heads still have, int64 ``[layers, heads]``: what one cannot spend any
                more goes to the others. None: all tokens.
        """
        if self.tolerance is None:
            assert self.budget is not None
            fraction = min(1.0, self.budget.slots(tokens) / tokens)
            shares = torch.ones(curves.error.shape[:2])
            if fraction >= float(curves.kept[0]):  # less: nothing is left to spend anywhere
                shares = torch.tensor(curves.allocate(fraction), dtype=torch.float64)
                if held is not None:
                    limits = held.double() / tokens
                    total = fraction * limits.numel()
                    shares = spend(shares * fraction, total, limits) / fraction
            found = [[Budget(self.budget.value, x) for x in row] for row in shares.tolist()]
            return found, torch.zeros(shares.shape, dtype=torch.bool)
        most = 1.0 if self.max_budget is None else self.max_budget.slots(tokens) / tokens
        kept, above = curves.within(self.tolerance, min(1.0, most))
        if held is not None:
            kept = torch.minimum(kept, held / tokens)
        limit = self.max_budget.value if self.max_budget is not None else None
        # An int stays the limit however long the stream gets.
        slots: list[list[int | None]] = [[None] * kept.shape[1]] * kept.shape[0]
        if isinstance(limit, int):
            slots = (kept / kept.mean() * limit).long().clamp(min=1).tolist()
        found = [
            [Budget(1.0, share, limit) for share, limit in zip(*rows, strict=True)]
            for rows in zip(kept.tolist(), slots, strict=True)
        ]
        return found, above

    def _note_above(self, number: int, rows: Sequence[Tensor], shard: Shard | None = None) -> None:
        above = torch.stack(list(rows)).any(0)
        if shard is not None:
            above = above.chunk(shard.ranks)[shard.rank]
        self.above[number] = above

    def forget(self, number: int) -> None:
        """A layer is not what it was when it was measured."""
        self._measured.pop(number, None)
        self._scores.pop(number, None)
        self.above.pop(number, None)


def _measurable(stream: Stream) -> bool:
    """Whether there are enough tokens and queries to measure on."""
    method = stream.method
    enough = stream.seen >= least_tokens(method.sink, method.recent)
    return enough and stream.queries.count >= min(stream.seen, 64)


def measure(stream: Stream, shard: Shard | None) -> list[Curves]:
    """A layer's curves on the tokens it holds, one per row; of a long prompt, on its sinks and last
    tokens: errors at equal shares change little with length, the time to measure them does. Of a
    shard: its heads' part of the error of the whole layer."""
    method = stream.method
    sink, recent = method.sink, method.recent
    slots, observed = stream.visible, stream.queries.all()
    assert observed is not None
    if slots.count > _MEASURED_TOKENS:
        last = _MEASURED_TOKENS - sink
        slots = Slots.cat([slots.narrow(0, sink), slots.narrow(slots.count - last, last)])
        queries = min(observed.queries.shape[2], last)
        observed = observed.narrow(observed.queries.shape[2] - queries, queries)
    held_out = held_out_for(slots.count, sink, recent)
    held_out = min(held_out, observed.queries.shape[2] // 2)
    total = None if shard is None else shard.summed

    def compress(slots: Slots, budget: int, before: Observed) -> Slots:
        fresh = method.fresh() if isinstance(method, WindowedSketch) else copy.deepcopy(method)
        return fresh(slots, budget, before, scored=True)

    return measure_rows(
        slots, observed, compress, held_out, sink, recent, total=total, observe=method.observe
    )


def make_plan(
    budget: int | float | None,
    tolerance: float | None,
    max_budget: int | float | None,
    allocation: str | Path | Curves,
    schedule: Schedule | None,
    prefill: str,
) -> Plan:
    """The plan that a cache's arguments ask for.

    Raises:
        InputError: an argument out of range, or two that exclude each other.
    """
    curves = None
    if isinstance(allocation, Curves):
        curves = allocation
    elif isinstance(allocation, Path) or allocation not in ALLOCATIONS:
        curves = _loaded(allocation)
    if schedule is not None and (allocation != "even" or tolerance is not None):
        given = f"tolerance={tolerance!r}" if tolerance is not None else f"{allocation=}"
        raise InputError(f"schedule and {given} both say how the budget is spent: give one")
    if tolerance is None:
        if max_budget is not None:
            raise InputError(f"max_budget={max_budget!r} bounds a tolerance, which was not given")
        kind = "curves" if curves is not None else "schedule" if schedule is not None else None
        spent = Budget(0.5 if budget is None else budget)
        return Plan(kind or str(allocation), spent, schedule, curves)
    check_tolerance(tolerance, budget, prefill)
    most = None if max_budget is None else Budget(max_budget)
    return Plan("tolerance", None, None, curves, float(tolerance), most)


def _loaded(allocation: Any) -> Curves:
    if not isinstance(allocation, (str, Path)) or not Path(allocation).is_file():
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, Curves, or the "
            "path of a file of them"
        )
    return Curves.load(allocation)
