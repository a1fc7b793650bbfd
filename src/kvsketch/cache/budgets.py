"""The budgets of a layer's KV heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.storage import PLAIN, Price
from kvsketch.errors import InputError
from kvsketch.state import Reader, State


class HeadBudgets:
    """The budgets of a layer's KV heads, the same in all rows of a batch or row by row.

    Args:
        rows: budgets ``[1 or batch][heads]``, all of the same ``value``.
        by_row: whether each row of the batch has its own budgets.
        measured: they follow from errors, so that equal budgets of heads are coincidental and may
            differ between the ranks of a sharded model.
        bound: for a tolerance: limit on the average cost, as ``Budget.value``; None: no limit.
        price: of the slots that a budget, the cost of so many tokens, buys. Default: a slot costs a
            token.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Budget]],
        by_row: bool = False,
        bound: int | float | None = None,
        measured: bool = False,
        price: Price = PLAIN,
    ) -> None:
        self.by_row = by_row
        self.price = price
        self.bound = bound
        self.measured = measured
        self.rows = tuple(tuple(row) for row in rows)
        flat = {budget for row in self.rows for budget in row}
        #: the budget of every head, if they are equal by design and not by coincidence: the time of
        #: a row's compression must not depend on whether other rows' heads are equal, nor that of a
        #: rank on whether its own are.
        chance = by_row or measured
        self.even: Budget | None = next(iter(flat)) if len(flat) == 1 and not chance else None
        self.value = self.rows[0][0].value
        self.heads = len(self.rows[0])
        shares = [[b.share for b in row] for row in self.rows]
        self._share = torch.tensor(shares, dtype=torch.float64, device="cpu")
        limits = [[b.limit for b in row] for row in self.rows]
        limited = any(x is not None for row in limits for x in row)
        most = torch.iinfo(torch.int64).max
        self._limit = (
            torch.tensor([[most if x is None else x for x in row] for row in limits], device="cpu")
            if limited
            else None
        )

    def of(self, value: int | float) -> HeadBudgets:
        """The same shares of another budget."""
        rows = [[Budget(value, budget.share) for budget in row] for row in self.rows]
        return HeadBudgets(rows, self.by_row, self.bound, self.measured, self.price)

    def slots(self, tokens: int, batch: int | None = None) -> int | Tensor:
        """Slots that may be kept after ``tokens`` tokens: a number, or int64 ``[batch, heads]``
        where heads differ (without ``batch``: 1 row if all are the same). As ``Budget.slots``, head
        by head."""
        if self.even is not None and not self.price.fixed:
            return self.even.slots(tokens)
        if self.price.fixed:
            found = self._bought(tokens)
        elif isinstance(self.value, int):
            found = torch.full(self._share.shape, self.value, dtype=torch.int64, device="cpu")
            if tokens > self.value:
                uneven = (self.value * self._share).round().long().clamp(min=1)
                found = torch.where(self._share == 1, found, uneven)
        else:
            found = (self.value * self._share * tokens - 1e-9).ceil().long().clamp(min=1)
            if self._limit is not None:
                found = torch.minimum(found, self._limit)
        if self.even is not None:
            return int(found[0, 0])
        return found if batch is None else found.expand(batch, -1)

    def _bought(self, tokens: int) -> Tensor:
        """The slots that the bytes of the budget buy, int64 ``[1 or batch, heads]``."""
        if isinstance(self.value, int):
            share = self._share if tokens > self.value else torch.ones_like(self._share)
            return self._counted(self.value * share)
        found = self._counted(self.value * self._share * tokens)
        if self._limit is not None:
            found = torch.minimum(found, self._counted(self._limit.clamp(max=2**40).double()))
        return found.clamp(max=tokens)

    def _counted(self, paid: Tensor) -> Tensor:
        return (self.price.buys(paid) + 1e-6).long().clamp(min=1)

    def average(self, tokens: int) -> int:
        """The average cost of a KV head, in tokens, over all heads of the model that share the
        budget, the same on every rank of a sharded one and for every row. A tolerance has no such
        average: its bound, or a quarter of the tokens."""
        known = self.even is not None or isinstance(self.value, int) or self.value < 1
        return (self.even or Budget(self.value if known else self.bound or 0.25)).average(tokens)

    def to_state(self) -> State:
        """The budget of every head."""
        flags = {"by_row": self.by_row, "measured": self.measured, "bound": self.bound}
        state = State(values={**flags, "value": self.value, "price": asdict(self.price)})
        state.keep(share=self._share, limit=self._limit)
        return state

    @staticmethod
    def from_state(reader: Reader, batch: int, heads: int) -> HeadBudgets:
        """Restore the result of ``to_state``.

        Raises:
            InputError: invalid shares or limits.
        """
        by_row, measured = reader.flag("by_row"), reader.flag("measured")
        value, bound = reader.anything("value"), reader.anything("bound")
        shape = (batch if by_row else 1, heads)
        share = reader.tensor("share", shape, torch.float64).cpu()
        most = torch.iinfo(torch.int64).max
        limits = torch.full(shape, most, device="cpu")
        if reader.has("limit"):
            limits = reader.integers("limit", shape, 0, most).cpu()
        price = PLAIN
        if reader.has("price"):  # files of version 0.1 of a budget that counted slots have none
            part = reader.part("price")
            slot, fixed, whole = (part.number(name) for name in ("slot", "fixed", "whole"))
            price = Price(slot, fixed, part.whole("window", 0, 1 << 31), whole)
            part.close()
            if slot <= 0 or fixed < 0 or whole <= 0:
                raise reader.wrong("price", price, "positive")
        reader.close()
        for given in (value, bound) if bound is not None else (value,):
            Budget(given)  # raises
        if bool((share < 0).any()):
            raise InputError("share: a head's share of the budget must be >= 0")
        rows = [
            [Budget(value, x, None if y == most else y) for x, y in zip(*row, strict=True)]
            for row in zip(share.tolist(), limits.tolist(), strict=True)
        ]
        return HeadBudgets(rows, by_row, bound, measured, price)

    @property
    def whole(self) -> bool:
        """Whether all tokens are always kept."""
        least = self.value * float(self._share.min())
        return isinstance(self.value, float) and self._limit is None and least >= 1 - 1e-9

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> HeadBudgets:
        """With ``fn``, which selects along axis 0, applied to the rows."""
        if not self.by_row:
            return self
        rows = fn(torch.arange(len(self.rows), device="cpu")).tolist()
        return HeadBudgets([self.rows[i] for i in rows], True, self.bound, price=self.price)
