"""When decoding compresses, and to which size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.window import Windowed
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.page.quantized import FULL, Bits

# Decoding compresses to this many buffers below the budget: rare compressions take less time.
_BELOW = 3


@dataclass(frozen=True)
class Pace:
    """The schedule of compressions while decoding: a layer grows to one buffer above the budget and
    is compressed to some buffers below it, all heads at the same token.

    Attributes:
        method: with its sink and recent window, the minimum size after a compression.
        given: the buffer in slots; None: 1/40 of the average head's budget, at least 1, at most 64.
        one_shot: decoding never compresses.
        bits: of the slots between sinks and recent window.
    """

    method: Windowed | WindowedSketch
    given: int | None
    one_shot: bool
    bits: Bits

    def buffer(self, budget: int) -> int:
        """The number of slots by which decoding may exceed the budget, from the average head's
        budget: a head with a small share would otherwise compress at every other token, and the
        limit is on the bytes of all heads."""
        return self.given or max(1, min(64, budget // 40))

    @property
    def period(self) -> int:
        """The number of buffers from one compression to the next. Tokens appended to a page in 8 or
        4 bits are in full precision, and a sketch cannot return tokens."""
        return 1 + _BELOW if self.bits == FULL and isinstance(self.method, Windowed) else 2

    def least(self, budget: int | Tensor) -> int | Tensor:
        """The part of a budget that sinks and recent window take."""
        window = self.method.sink + self.method.recent
        return min(budget, window) if isinstance(budget, int) else budget.clamp(max=window)

    def recent(self, budget: int | Tensor) -> int | Tensor:
        """Recent tokens that are kept unchanged within a budget."""
        if isinstance(budget, int):
            return min(self.method.recent, budget - min(self.method.sink, budget))
        return (budget - budget.clamp(max=self.method.sink)).clamp(max=self.method.recent)

    def below(self, budget: int | Tensor, buffer: int) -> int | Tensor:
        """The size after a compression."""
        less, least = budget - buffer * (self.period - 1), self.least(budget)
        if isinstance(less, int) and isinstance(least, int):
            return max(less, least, 1)
        return torch.maximum(torch.as_tensor(less), torch.as_tensor(least)).clamp(min=1)

    def room(
        self,
        budgets: HeadBudgets,
        seen: int,
        count: int,
    ) -> int:
        """How many more tokens a page of ``count`` slots that is full may take before it is
        compressed."""
        if self.one_shot:  # grows without limit, by a few per cent at a time
            return self.buffer(count)
        average = budgets.average(seen)
        buffer = self.buffer(average)
        if self.early:  # room is in full precision: only the buffer
            return buffer
        if budgets.even is not None:
            return max(1, budgets.even.slots(seen) + buffer - count)
        # The same for all heads and rows, independently of their sizes.
        return buffer + average - budgets.average(seen - 1)

    def due(self, budgets: HeadBudgets, seen: int, held: Tensor, prefill: bool) -> bool:
        """Whether so far uncompressed tokens must be compressed: at the end of a prompt if they
        exceed the budget, otherwise if they exceed it by a buffer.

        Args:
            held: how many there are, int64 ``[batch, heads]``.
        """
        if self.one_shot and not prefill:
            return False
        fits = budgets.slots(seen)
        above = held.to(torch.int64) - torch.as_tensor(self.least(fits) if self.early else fits)
        return bool((above >= (1 if prefill else self.buffer(budgets.average(seen)))).any())

    @property
    def early(self) -> bool:
        """Whether slots are quantised even if they fit the budget."""
        return self.bits != FULL and isinstance(self.method, Windowed)
