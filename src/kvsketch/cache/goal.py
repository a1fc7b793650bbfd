"""The goal of a plan, a budget or a tolerance, and the budgets that follow from measured errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.curves import Curves, spend
from kvsketch.cache.storage import Price

# Target for the peak of a prefill, as a fraction of the exact cache, or this much above the
# smallest possible peak: one layer exact, the others compressed.
_PEAK, _SLACK = 0.5, 0.07
#: An upper bound until the last layer is known is worth a compression if it leaves at most this
#: part of the slots. Each layer changes those of all before it: a model of many layers would
#: compress hundreds of times.
WORTH = 0.95


@dataclass(frozen=True)
class Goal:
    """
    Attributes:
        budget: the average over layers and heads; None with a tolerance.
        tolerance: limit on every head's relative error; None with a budget.
        max_budget: limit on the average cost of a tolerance; None: no limit.
    """

    budget: Budget | None
    tolerance: float | None = None
    max_budget: Budget | None = None

    @property
    def bound(self) -> int | float | None:
        """For a tolerance: limit on its average cost, as ``Budget.value``."""
        return None if self.max_budget is None else self.max_budget.value

    def fraction(self, tokens: int) -> float:
        """The average budget, as a fraction of the tokens; 1 if there is no limit."""
        most = self.budget or self.max_budget
        return 1.0 if most is None else min(1.0, most.slots(tokens) / tokens)

    def at_most(self, measured: int, layers: int, tokens: int) -> float | None:
        """The average size of the layers measured so far until the last one is measured, as a
        fraction of the tokens, so that the peak of the prefill stays at its target with one more
        layer exact; None: all tokens.

        Args:
            measured: number of measured layers.
            layers: of the model.
        """
        final = self.fraction(tokens)
        peak = max(_PEAK, final + (1 - final) / layers + _SLACK)
        if peak * layers - 1 >= measured:
            return None
        # That of all layers but the last at once, so that each is compressed once.
        return max(final, (peak * layers - 1) / (layers - 1))

    def spent(
        self, curves: Curves, tokens: int, prices: Sequence[Price], held: Tensor | None = None
    ) -> tuple[list[list[Budget]], Tensor]:
        """The budget of every head of every layer, and which heads (bool ``[layers, heads]``) are
        kept above the tolerance by ``max_budget``.

        Args:
            curves: of all layers; ``kept`` is a cost, as are the budgets.
            tokens: seen.
            prices: of every layer's slots.
            held: slots that heads still have, int64 ``[layers, heads]``: budget that a head cannot
                use goes to the others. None: all tokens.
        """
        limits = None
        if held is not None:
            costs = [p.cost(row.double()) for p, row in zip(prices, held, strict=True)]
            limits = torch.stack(costs) / tokens
        if self.tolerance is not None:
            return self._tolerated(curves, tokens, limits)
        assert self.budget is not None
        fraction = self.fraction(tokens)
        shares = torch.ones(curves.error.shape[:2], dtype=torch.float64, device="cpu")
        if fraction >= curves.least:  # less: nothing is left to allocate
            shares = torch.tensor(curves.allocate(fraction), dtype=torch.float64, device="cpu")
            if limits is not None:
                total = fraction * limits.numel()
                shares = spend(shares * fraction, total, limits) / fraction
        found = [[Budget(self.budget.value, x) for x in row] for row in shares.tolist()]
        return found, torch.zeros(shares.shape, dtype=torch.bool, device="cpu")

    def _tolerated(
        self, curves: Curves, tokens: int, limits: Tensor | None
    ) -> tuple[list[list[Budget]], Tensor]:
        assert self.tolerance is not None
        kept, above = curves.within(self.tolerance, self.fraction(tokens))
        if limits is not None:
            kept = torch.minimum(kept, limits)
        limit = self.bound
        # An int stays the limit for a stream of any length.
        slots: list[list[int | None]] = [[None] * kept.shape[1]] * kept.shape[0]
        if isinstance(limit, int):
            slots = (kept / kept.mean() * limit).long().clamp(min=1).tolist()
        found = [
            [Budget(1.0, share, most) for share, most in zip(*rows, strict=True)]
            for rows in zip(kept.tolist(), slots, strict=True)
        ]
        return found, above
