"""Budgets told from the prompt itself: a layer waits with all its tokens until they are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..budget import Budget
from ..errors import InputError
from ..slots import Observed, Slots
from .curves import Curves, held_out_for, least_tokens, measure_rows, of_layers
from .error import QUERIES
from .head_groups import HeadGroups
from .periodic import Periodic
from .recipe import Recipe
from .row_groups import RowGroup, RowGroups
from .shard import Shard

# Tokens that errors are measured on at most.
_MEASURED_TOKENS = 4096


@dataclass(frozen=True)
class Goal:
    """What the budgets are to achieve: a total, spent where the error falls most, or a tolerance.

    Attributes:
        budget: the average over layers and heads; None with a tolerance.
        tolerance: of every head's relative error; None with a budget.
        max_budget: what a tolerance may cost on average; None: as much as it takes.
        curves: measured before, on other prompts; None: measured on the prompt.
    """

    budget: Budget | None = None
    tolerance: float | None = None
    max_budget: Budget | None = None
    curves: Curves | None = None

    @property
    def alone(self) -> bool:
        """Whether a layer's budgets follow from that layer alone."""
        return self.curves is not None or (self.tolerance is not None and self.max_budget is None)

    def budgets(self, curves: Curves, tokens: int) -> tuple[list[list[Budget]], Tensor]:
        """The budget of every head of every layer, and which heads (bool ``[layers, heads]``) are
        kept above the tolerance by ``max_budget``."""
        if self.tolerance is None:
            assert self.budget is not None
            fraction = min(1.0, self.budget.slots(tokens) / tokens)
            shares = torch.ones(curves.error.shape[:2])
            if fraction >= float(curves.kept[0]):  # less: nothing is left to spend anywhere
                shares = torch.tensor(curves.allocate(fraction))
            found = [[Budget(self.budget.value, x) for x in row] for row in shares.tolist()]
            return found, torch.zeros(shares.shape, dtype=torch.bool)
        most = 1.0 if self.max_budget is None else self.max_budget.slots(tokens) / tokens
        kept, above = curves.within(self.tolerance, min(1.0, most))
        limit = self.max_budget.value if self.max_budget is not None else None
        # An int stays the limit however long the stream gets.
        limits = (
            (kept / kept.mean() * limit).long().clamp(min=1).tolist()
            if isinstance(limit, int)
            else [[None] * kept.shape[1]] * kept.shape[0]
        )
        found = [
            [Budget(1.0, share, most) for share, most in zip(*rows, strict=True)]
            for rows in zip(kept.tolist(), limits, strict=True)
        ]
        return found, above


class Planner:
    """Collects the curves of all layers of a cache and tells them their budgets.

    Unless a layer can be told alone, all layers hold all their tokens until the last one is
    measured: once, at the end of the prompt, the cache is as large as an uncompressed one.

    Args:
        goal: what for.
        layers: how many will wait.
        heads: KV heads of the model. A layer that has fewer is one of a tensor-parallel rank:
            budgets are then told over the heads of all ranks.
    """

    def __init__(self, goal: Goal, layers: int, heads: int) -> None:
        self.goal = goal
        self._layers, self._heads = layers, heads
        self._submitted: dict[int, tuple[Waiting, list[Curves]]] = {}
        #: heads above the tolerance in any row, bool ``[heads]``, by layer
        self.above: dict[int, Tensor] = {}

    def submit(self, layer: Waiting) -> bool:
        """A layer that has its prompts. Returns whether it was told its budgets.

        What is measured on a prompt is for that prompt alone: every row of the batch is told its
        own budgets."""
        heads, rows = layer.slots.keys.shape[1], layer.slots.keys.shape[0]
        if self.goal.curves is None and not layer.measurable:
            assert self.goal.budget is not None  # a number of slots, which may not be exceeded
            layer.adopt([[self.goal.budget] * heads] * rows)
            return True
        if self.goal.curves is None and self.goal.alone:  # every head is told alone, too
            told = [self.goal.budgets(curves, layer.seen) for curves in layer.measured()]
            self._note_above(layer.number, [above[0] for _, above in told])
            layer.adopt([found[0] for found, _ in told])
            return True
        shard = Shard.of(heads, self._heads)
        if self.goal.curves is not None:
            found, above = self.goal.budgets(self.goal.curves, layer.seen)
            self._note_above(layer.number, [above[layer.number]], shard)
            layer.adopt([shard.own(found[layer.number])] * rows)
            return True
        self._submitted[layer.number] = (layer, layer.measured(shard))
        if len(self._submitted) < self._layers:
            return False
        numbers = sorted(self._submitted)
        waiting, self._submitted = self._submitted, {}
        told = [
            self.goal.budgets(
                shard.whole(of_layers([waiting[number][1][row] for number in numbers])), layer.seen
            )
            for row in range(rows)
        ]
        for place, number in enumerate(numbers):
            self._note_above(number, [above[place] for _, above in told], shard)
            waiting[number][0].adopt([shard.own(found[place]) for found, _ in told])
        return True

    def _note_above(self, number: int, rows: Sequence[Tensor], shard: Shard | None = None) -> None:
        above = torch.stack(list(rows)).any(0)
        if shard is not None:
            above = above.chunk(shard.ranks)[shard.rank]
        self.above[number] = above

    def forget(self, number: int) -> None:
        """A layer is not what it was when it was measured."""
        self._submitted.pop(number, None)
        self.above.pop(number, None)


class Waiting(Periodic):
    """Holds all tokens, and the queries it takes to measure on them, until a ``Planner`` tells the
    budgets; then builds the layer's driver and hands everything over.

    Args:
        number: of the layer, among those that wait.
        planner: shared by them.
        recipe: of the layer's driver.

    Attributes:
        on_told: called with the driver; for whoever holds this to set.
    """

    def __init__(self, number: int, planner: Planner, recipe: Recipe) -> None:
        self.number = number
        self.on_told: Callable[[Periodic | HeadGroups | RowGroups], None] | None = None
        self._planner, self._recipe = planner, recipe
        super().__init__(recipe.reduce(), Budget(1.0))
        # What is measured: queries held out, and those before them that a method looks at.
        window = self.compressor.window
        every = self.compressor.needs_queries and window is None
        self._keep = None if every else 128 + max(QUERIES, window or 0)

    def wants_queries(self, count: int) -> bool:
        return self._planner.goal.curves is None or super().wants_queries(count)

    def settle(self, observed: Observed | None, prefill: bool, hold: bool = False) -> bool:
        """Take note; ask for budgets if it is time. Returns whether they came."""
        if observed is not None:
            self._observed.append(observed)
            held = sum(o.queries.shape[2] for o in self._observed)
            if self._keep is not None and held > 2 * self._keep:
                self._keep_last(self._keep)
        if hold or not self._ready(prefill):
            return False
        return self._planner.submit(self)

    @property
    def measurable(self) -> bool:
        """Whether there are enough tokens and queries to measure on."""
        held = sum(o.queries.shape[2] for o in self._observed)
        window = (self.compressor.sink, self.compressor.recent)
        return self.seen >= least_tokens(*window) and held >= min(self.seen, 64)

    def _ready(self, prefill: bool) -> bool:
        goal = self._planner.goal
        if goal.budget is not None and not goal.budget.is_fraction:
            budget = goal.budget.slots(self.seen)
            above = 0 if prefill else self.buffer_for(budget)
            return self.seen > budget and self.seen >= budget + above
        return goal.curves is not None or self.measurable

    def measured(self, shard: Shard | None = None) -> list[Curves]:
        """This layer's curves on the tokens held, one per row; of a long prompt, on its sinks and
        last tokens: errors at equal shares change little with length, the time to measure them
        does. Of a shard: its heads' part of the error of the whole layer."""
        sink, recent = self.compressor.sink, self.compressor.recent
        slots, observed = self.visible, self._waiting()
        if slots.count > _MEASURED_TOKENS:
            last = _MEASURED_TOKENS - sink
            slots = Slots.cat([slots.narrow(0, sink), slots.narrow(slots.count - last, last)])
            queries = min(observed.queries.shape[2], last)
            observed = observed.narrow(observed.queries.shape[2] - queries, queries)
        held_out = held_out_for(slots.count, sink, recent)
        held_out = min(held_out, observed.queries.shape[2] // 2)

        def compress(slots: Slots, budget: int, before: Observed) -> Slots:
            return self._recipe.reduce()(slots, budget, before, scored=True)

        total = None if shard is None else shard.summed
        observe = self._recipe.reduce().observe
        return measure_rows(
            slots, observed, compress, held_out, sink, recent, total=total, observe=observe
        )

    def adopt(self, budgets: Sequence[Sequence[Budget]]) -> None:
        """Hand everything to a driver with these budgets: one per KV head, for every row.

        Raises:
            InputError: not one budget per row and KV head.
        """
        rows, heads = self.slots.keys.shape[:2]
        if len(budgets) != rows or any(len(row) != heads for row in budgets):
            raise InputError(
                f"budgets of {len(budgets)} rows x {[len(row) for row in budgets]} KV heads for a "
                f"layer of {rows} x {heads}"
            )
        distinct = list(dict.fromkeys(tuple(row) for row in budgets))
        driver: Periodic | HeadGroups | RowGroups
        if len(distinct) == 1:
            driver = self._recipe.build(distinct[0])
        else:
            members = [[r for r, row in enumerate(budgets) if tuple(row) == b] for b in distinct]
            driver = RowGroups(
                [
                    RowGroup(torch.tensor(own), self._recipe.build(b))
                    for own, b in zip(members, distinct, strict=True)
                ]
            )
        driver.extend(self.slots)
        if self._live is not None:
            driver.mark_padding(self._live)
        driver.settle(self._waiting() if self._observed else None, prefill=True)
        super().reset()
        if self.on_told is not None:
            self.on_told(driver)

    def compresses_next(self, tokens: int) -> bool:
        return self._ready(prefill=tokens > 1)

    def reset(self) -> None:
        super().reset()
        self._planner.forget(self.number)

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self._observed = []
        self._planner.forget(self.number)
