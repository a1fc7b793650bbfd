"""How often decoding compresses, and how far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .budgets import HeadBudgets
from .next_page import Held
from .storage import FULL, Bits
from .window import Windowed
from .windowed_sketch import WindowedSketch

# Buffers that decoding compresses below the budget: rare compressions cost less time.
_BELOW = 3


@dataclass(frozen=True)
class Pace:
    """The rhythm of a layer that decodes: it runs one buffer above the budget and compresses to
    some buffers below it, all heads at the same token.

    Attributes:
        method: with its sink and recent window, which no compression goes below.
        given: the buffer in slots; None: 1/40 of the average head's budget, at least 1, at most 64.
        one_shot: decoding never compresses.
        bits: of the slots between sinks and recent window.
    """

    method: Windowed | WindowedSketch
    given: int | None
    one_shot: bool
    bits: Bits

    def buffer(self, budget: int) -> int:
        """How far decoding may run above the budget. That of the average head counts: one with a
        small share would else compress every other token, and the bytes of all heads are what
        counts."""
        return self.given or max(1, min(64, budget // 40))

    @property
    def period(self) -> int:
        """Buffers that decoding fills from one compression to the next. What is appended to a page
        of few bits is in full precision, and a sketch takes in what it gets for good."""
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
        """What decoding compresses to."""
        less, least = budget - buffer * (self.period - 1), self.least(budget)
        if isinstance(less, int) and isinstance(least, int):
            return max(less, least, 1)
        return torch.maximum(torch.as_tensor(less), torch.as_tensor(least)).clamp(min=1)

    def room(
        self,
        budgets: HeadBudgets,
        seen: int,
        page: Held,
    ) -> int:
        """How many more tokens a page that is full may take before it is compressed."""
        if self.one_shot:  # grows for good, by a few per cent at a time
            return self.buffer(page.count)
        average = budgets.average(seen)
        buffer = self.buffer(average)
        if self.early:  # room is in full precision: only the buffer
            return buffer
        if budgets.even is not None:
            return max(1, budgets.even.slots(seen) + buffer - page.count)
        # All heads and rows alike, whatever each of them holds.
        return buffer + average - budgets.average(seen - 1)

    def due(self, budgets: HeadBudgets, seen: int, held: Tensor, prefill: bool) -> bool:
        """Whether tokens, of which none was compressed, are to be: at the end of a prompt if they
        are more than the budget, else if they are a buffer more.

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
        """Whether slots are quantised although they fit the budget."""
        return self.bits != FULL and isinstance(self.method, Windowed)
