"""The plan: how a budget is spent over layers and KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_tolerance
from ..budget import ALLOCATIONS, Budget, Schedule, scheduled
from ..errors import InputError, UnsupportedError
from .budgets import HeadBudgets
from .curves import Curves, of_layers, pooled, spend
from .error import QUERIES
from .measure import measurable, measure
from .needs import by_need
from .shard import Shard
from .storage import FULL, Bits, Price, best_at, choose
from .stream import Stream
from .windowed_sketch import WindowedSketch

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

    Whatever the kind, it may choose for every layer in how many bits slots are stored, by errors
    measured on this prompt. A budget is then what that many slots would cost in the model's dtype.

    The cache owns the plan, and asks it to ``hand_down`` what follows when the attention of a layer
    is done.

    Args:
        kind: see above.
        budget: the average over layers and heads; None with a tolerance.
        schedule: as for ``scheduled``.
        curves: measured before.
        tolerance: of every head's relative error.
        max_budget: what a tolerance may cost on average; None: as much as it takes.
        choices: bits to choose from; the first are what a bound stores slots in.
    """

    def __init__(
        self,
        kind: str,
        budget: Budget | None,
        schedule: Schedule | None = None,
        curves: Curves | None = None,
        tolerance: float | None = None,
        max_budget: Budget | None = None,
        choices: Sequence[Bits] = (FULL,),
    ) -> None:
        self.choices = choices
        self.kind, self.budget, self.schedule, self.curves = kind, budget, schedule, curves
        self.tolerance, self.max_budget = tolerance, max_budget
        self._layers, self._heads = 0, 0
        #: heads above the tolerance in any row, bool ``[heads]``, by layer
        self.above: dict[int, Tensor] = {}
        #: of a layer that was measured: for each choice of bits, curves of every row, and prices
        self._measured: dict[int, dict[Bits, list[Curves]]] = {}
        self._prices: dict[int, dict[Bits, Price]] = {}
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
        if self.chooses or self.kind not in ("even", "schedule"):
            return [None] * layers
        assert self.budget is not None
        return [HeadBudgets([row]) for row in self._told()]

    def _told(self) -> list[list[Budget]]:
        """The budgets of every layer's heads that are known before the first token."""
        assert self.budget is not None
        return scheduled(self.budget, self.schedule, self._layers, [self._heads] * self._layers)

    @property
    def chooses(self) -> bool:
        """Whether it chooses bits."""
        return len(self.choices) > 1

    @property
    def measures(self) -> bool:
        """Whether it measures on the prompt, for which it takes the prompt's queries."""
        return self.chooses or (self.kind in ("measured", "tolerance") and self.curves is None)

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
        return (self.curves is not None and not self.chooses) or measurable(stream)

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
        for place, budget, bits, provisional in found:
            streams[place].spend(budget, provisional, bits)
        if stream.waits and stream.method.window is not None:
            stream.queries.keep_last(stream.method.window)  # it has been measured
        elif stream.waits and number in self._measured:
            stream.fold()  # all queries count, and scores are smaller
        return bool(found)

    def _next_budgets(
        self, number: int, streams: Sequence[Stream]
    ) -> list[tuple[int, HeadBudgets, Bits | None, bool]]:
        """What to hand down now that layer ``number`` has its prompt: layers, their budgets, bits
        (None: as the stream has them), and whether these are upper bounds that a later call
        replaces.

        What is measured on a prompt is for that prompt alone: every row of the batch gets its own
        budgets (bits are those of all rows). Unless a layer's budgets follow from that layer alone,
        they follow from all: a layer that is measured is meanwhile compressed to what its heads may
        need at most (``_bounds``).
        """
        stream = streams[number]
        heads = stream.slots.keys.shape[1]
        shard = Shard.of(heads, self._heads)
        if not measurable(stream) and (self.chooses or self.curves is None):
            # a number of slots, which may not be exceeded
            assert self.budget is not None
            return [(number, HeadBudgets([[self.budget] * heads]), None, False)]
        spent = self.kind in ("measured", "tolerance") and self.curves is None
        if spent or self.chooses:
            self._measure(number, stream, shard)
        if not spent:
            return self._apart(number, streams, shard)
        if self.kind == "tolerance":
            self._cheapest(number)
            if self.max_budget is None:
                return [self._alone(number, streams)]
        numbers = sorted(self._measured)
        if len(numbers) < self._layers:
            first = [self._rows(n, next(iter(self._measured[n])), shard) for n in numbers]
            return self._bounds(numbers, _by_row(first), streams, shard)
        bits = self._chosen(numbers, shard)
        whole = _by_row([self._rows(n, b, shard) for n, b in zip(numbers, bits, strict=True)])
        prices = [self._prices[n][b] for n, b in zip(numbers, bits, strict=True)]
        held = torch.stack([streams[n].held for n in numbers], dim=1)  # [rows, layers, heads]
        told = [
            self._spent(curves, stream.seen, prices, shard.whole_held(held[row]))
            for row, curves in enumerate(whole)
        ]
        self._measured, self._prices = {}, {}
        bound = None if self.max_budget is None else self.max_budget.value
        found = []
        for place, n in enumerate(numbers):
            self._note_above(n, [above[place] for _, above in told], shard)
            own = [shard.own(each[place]) for each, _ in told]
            found.append((n, HeadBudgets(own, True, bound), self._named(bits[place]), False))
        return found

    def _named(self, bits: Bits) -> Bits | None:
        return bits if self.chooses else None

    def _measure(self, number: int, stream: Stream, shard: Shard) -> None:
        alone = self.kind == "tolerance" and self.max_budget is None
        found = measure(stream, None if alone else shard, self.choices)
        self._measured[number], self._prices[number] = found

    def _rows(self, number: int, bits: Bits, shard: Shard) -> list[Curves]:
        """A layer's curves with all its heads, row by row."""
        return [shard.whole(row) for row in self._measured[number][bits]]

    def _chosen(self, numbers: list[int], shard: Shard) -> list[Bits]:
        """The bits of every layer."""
        if not self.chooses or self.budget is None:
            return [next(iter(self._measured[n])) for n in numbers]
        options = [[pooled(self._rows(n, b, shard)) for b in self.choices] for n in numbers]
        tokens = self._prices[numbers[0]][self.choices[-1]].tokens
        found = choose(options, min(1.0, self.budget.slots(tokens) / tokens))
        return [self.choices[i] for i in found]

    def _cheapest(self, number: int) -> None:
        """Of a layer's choices, the one that costs least within the tolerance is left."""
        assert self.tolerance is not None
        curves = self._measured[number]
        costs = {
            bits: sum(float(row.within(self.tolerance)[0].mean()) for row in rows)
            for bits, rows in curves.items()
        }
        best = min(costs, key=lambda bits: costs[bits])
        self._measured[number] = {best: curves[best]}

    def _alone(
        self, number: int, streams: Sequence[Stream]
    ) -> tuple[int, HeadBudgets, Bits | None, bool]:
        """The budgets of a tolerance that nothing bounds, which follow from a layer alone."""
        prices = self._prices.pop(number)
        (bits, rows), *_ = self._measured.pop(number).items()
        told = [self._spent(curves, streams[number].seen, [prices[bits]]) for curves in rows]
        self._note_above(number, [above[0] for _, above in told])
        return number, HeadBudgets([found[0] for found, _ in told], True), self._named(bits), False

    def _apart(
        self, number: int, streams: Sequence[Stream], shard: Shard
    ) -> list[tuple[int, HeadBudgets, Bits | None, bool]]:
        """Where slots are told without errors: bits, if they are to be chosen, are those that err
        least where every head pays the average."""
        stream = streams[number]
        together = self.kind == "global"
        if self.kind in BY_NEED:
            if shard.ranks > 1:
                raise UnsupportedError(
                    f"allocation={self.kind!r} compares the scores of all KV heads, of which this "
                    "process holds a part; use 'even' or 'measured' with tensor parallelism"
                )
            self._scores[number] = stream.importance()
            if together and len(self._scores) < self._layers:
                return []
        numbers = sorted(self._scores) if together else [number]
        bits, price = FULL, Price()
        if self.chooses:
            assert self.budget is not None
            options = [[pooled(self._rows(n, b, shard)) for b in self.choices] for n in numbers]
            budget = min(1.0, self.budget.slots(stream.seen) / stream.seen)
            bits = self.choices[best_at(options, budget)]
            price = self._prices[number][bits]
            for n in numbers:
                del self._measured[n], self._prices[n]
        if self.kind in BY_NEED:
            found = self._by_need(numbers, streams, price)
        else:
            curves, bound = self.curves, None if self.max_budget is None else self.max_budget.value
            if curves is not None:
                prices = [price] * self._layers
                told, above = self._spent(curves, stream.seen, prices)
                self._note_above(number, [above[number]], shard)
                row = list(told[number])
            else:
                row = _bought(self._told()[number], price, stream.seen)
            own = HeadBudgets([shard.own(row)], bound=bound, measured=True)
            found = [(number, own)]
        return [(n, budgets, self._named(bits), False) for n, budgets in found]

    def _by_need(
        self, numbers: list[int], streams: Sequence[Stream], price: Price
    ) -> list[tuple[int, HeadBudgets]]:
        """Budgets by the scores of a layer, or of all."""
        assert self.budget is not None
        stream = streams[numbers[0]]
        method, seen, value = stream.method, stream.seen, self.budget.value
        average = self.budget.slots(seen)
        slots = int(float(price.buys(torch.tensor(average / seen))) * seen + 1e-6)
        safeguard = SAFEGUARD if self.kind == "layer" else 0.0
        scores = [self._scores.pop(n) for n in numbers]
        told = [
            by_need([s[row] for s in scores], slots, method.sink, method.recent, safeguard)
            for row in range(len(scores[0]))
        ]
        return [
            (
                n,
                HeadBudgets(
                    [[Budget(value, x / average) for x in found[place].tolist()] for found in told],
                    True,
                ),
            )
            for place, n in enumerate(numbers)
        ]

    def _bounds(
        self, numbers: list[int], whole: list[Curves], streams: Sequence[Stream], shard: Shard
    ) -> list[tuple[int, HeadBudgets, Bits | None, bool]]:
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
        shares = [torch.tensor(c.allocate(max(kept, c.least))) * kept for c in whole]
        found = []
        for place, n in enumerate(numbers):
            held = streams[n].held
            bits = next(iter(self._measured[n]))
            own = [shard.own(share[place].tolist()) for share in shares]
            bought = self._prices[n][bits].buys(torch.tensor(own, dtype=torch.float64))
            bound = (bought * tokens).ceil().long()
            slots = (bound.clamp(min=window) + extra).clamp(max=tokens)
            # Head by head, so that a row of the batch decides nothing for another.
            slots = torch.where(slots > _WORTH * held, held, slots)
            rows = [[Budget(1.0, x / tokens) for x in row] for row in slots.tolist()]
            found.append((n, HeadBudgets(rows, True), self._named(bits), True))
        return found

    def _spent(
        self, curves: Curves, tokens: int, prices: Sequence[Price], held: Tensor | None = None
    ) -> tuple[list[list[Budget]], Tensor]:
        """The budget of every head of every layer, and which heads (bool ``[layers, heads]``) are
        kept above the tolerance by ``max_budget``.

        Args:
            curves: of all layers.
            tokens: seen.
            prices: of every layer's slots.
            held: slots that heads still have, int64 ``[layers, heads]``: what one cannot spend any
                more goes to the others. None: all tokens.
        """

        def bought(cost: Tensor) -> Tensor:
            return torch.stack([p.buys(row) for p, row in zip(prices, cost, strict=True)])

        limits = None
        if held is not None:
            limits = held.double() / tokens
            limits = torch.stack([p.cost(row) for p, row in zip(prices, limits, strict=True)])
        if self.tolerance is None:
            assert self.budget is not None
            fraction = min(1.0, self.budget.slots(tokens) / tokens)
            shares = torch.ones(curves.error.shape[:2], dtype=torch.float64)
            if fraction >= curves.least:  # less: nothing is left to spend anywhere
                shares = torch.tensor(curves.allocate(fraction), dtype=torch.float64)
                if limits is not None:
                    total = fraction * limits.numel()
                    shares = spend(shares * fraction, total, limits) / fraction
            shares = bought(shares * fraction) / fraction if self.chooses else shares
            found = [[Budget(self.budget.value, x) for x in row] for row in shares.tolist()]
            return found, torch.zeros(shares.shape, dtype=torch.bool)
        most = 1.0 if self.max_budget is None else self.max_budget.slots(tokens) / tokens
        kept, above = curves.within(self.tolerance, min(1.0, most))
        if limits is not None:
            kept = torch.minimum(kept, limits)
        limit = self.max_budget.value if self.max_budget is not None else None
        # An int stays the limit however long the stream gets.
        slots: list[list[int | None]] = [[None] * kept.shape[1]] * kept.shape[0]
        if isinstance(limit, int):
            slots = (bought(kept) / kept.mean() * limit).long().clamp(min=1).tolist()
        found = [
            [Budget(1.0, share, limit) for share, limit in zip(*rows, strict=True)]
            for rows in zip(bought(kept).tolist(), slots, strict=True)
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
        self._prices.pop(number, None)
        self._scores.pop(number, None)
        self.above.pop(number, None)


def _by_row(layers: Sequence[Sequence[Curves]]) -> list[Curves]:
    """Curves of every layer's rows as those of a model, row by row."""
    return [of_layers([rows[i] for rows in layers]) for i in range(len(layers[0]))]


def _bought(row: Sequence[Budget], price: Price, tokens: int) -> list[Budget]:
    """Budgets that are costs as budgets of slots."""
    average = row[0].average(tokens) / tokens
    costs = torch.tensor([b.share for b in row], dtype=torch.float64) * average
    shares = (price.buys(costs.clamp(max=1.0)) / average).tolist()
    return [Budget(b.value, x) for b, x in zip(row, shares, strict=True)]


def make_plan(
    budget: int | float | None,
    tolerance: float | None,
    max_budget: int | float | None,
    allocation: str | Path | Curves,
    schedule: Schedule | None,
    prefill: str,
    choices: Sequence[Bits] = (FULL,),
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
        return Plan(kind or str(allocation), spent, schedule, curves, choices=choices)
    check_tolerance(tolerance, budget, prefill)
    most = None if max_budget is None else Budget(max_budget)
    if curves is not None and len(choices) > 1:
        raise InputError(
            f"bits='measured' and a tolerance ({tolerance!r}) by errors measured before exclude "
            "each other, since these know one way to store slots: leave out allocation, or give "
            "bits 16, 8 or 4"
        )
    return Plan("tolerance", None, None, curves, float(tolerance), most, choices)


def _loaded(allocation: Any) -> Curves:
    if not isinstance(allocation, (str, Path)) or not Path(allocation).is_file():
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, Curves, or the "
            "path of a file of them"
        )
    return Curves.load(allocation)
