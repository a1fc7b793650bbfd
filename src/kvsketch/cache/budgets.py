"""The budgets of a layer's KV heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..budget import Budget


class HeadBudgets:
    """The budgets of a layer's KV heads, the same in all rows of a batch or row by row.

    Args:
        rows: budgets ``[1 or batch][heads]``, all of the same ``value``.
    """

    def __init__(self, rows: Sequence[Sequence[Budget]]) -> None:
        self.rows = tuple(tuple(row) for row in rows)
        flat = {budget for row in self.rows for budget in row}
        #: the budget of every head, if they are the same
        self.even: Budget | None = next(iter(flat)) if len(flat) == 1 else None
        self.value = self.rows[0][0].value
        self.heads = len(self.rows[0])
        self._share = torch.tensor([[b.share for b in row] for row in self.rows]).double()
        limits = [[b.limit for b in row] for row in self.rows]
        limited = any(x is not None for row in limits for x in row)
        most = torch.iinfo(torch.int64).max
        self._limit = (
            torch.tensor([[most if x is None else x for x in row] for row in limits])
            if limited
            else None
        )

    def slots(self, tokens: int, batch: int) -> int | Tensor:
        """Slots that may be kept once ``tokens`` tokens were seen: a number, or int64 ``[batch,
        heads]`` where heads differ. As ``Budget.slots``, head by head."""
        if self.even is not None:
            return self.even.slots(tokens)
        if isinstance(self.value, int):
            found = torch.full(self._share.shape, self.value, dtype=torch.int64)
            if tokens > self.value:
                uneven = (self.value * self._share).round().long().clamp(min=1)
                found = torch.where(self._share == 1, found, uneven)
        else:
            found = (self.value * self._share * tokens - 1e-9).ceil().long().clamp(min=1)
            if self._limit is not None:
                found = torch.minimum(found, self._limit)
        return found.expand(batch, -1)

    def average(self, tokens: int) -> int:
        """Slots per KV head on average over all heads of the model that share the budget, the same
        on every rank of a sharded one; of a tolerance, which has no such average, over these
        heads."""
        if isinstance(self.value, int):
            return self.value
        if self.value < 1 or self.even is not None:
            return (
                Budget(self.value).slots(tokens) if self.even is None else self.even.average(tokens)
            )
        slots = self.slots(tokens, 1)
        return round(float(torch.as_tensor(slots).double().mean()))

    @property
    def whole(self) -> bool:
        """Whether all tokens are kept, however many come."""
        least = self.value * float(self._share.min())
        return isinstance(self.value, float) and self._limit is None and least >= 1 - 1e-9

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> HeadBudgets:
        """With ``fn``, which selects along axis 0, applied to the rows."""
        if len(self.rows) == 1:
            return self
        return HeadBudgets([self.rows[i] for i in fn(torch.arange(len(self.rows))).tolist()])
