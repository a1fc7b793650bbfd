"""When the slots of a layer are compressed, and to how many: one rule for every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray[Any, np.dtype[np.int64]]
# A compression goes to this many buffers below the budget: rare compressions take less time.
_BELOW = 3
# Beside slots in few bits recent tokens take at most this part of a budget, unless their number was
# given: in full precision each takes the bytes of three to four slots.
_RECENT = 8


def recent_beside(recent: int, budget: int) -> int:
    """Of ``recent`` tokens, those that stay as they are where the other slots are in few bits.

    Args:
        budget: of the average head, as the bytes of so many tokens.
    """
    return min(recent, budget // _RECENT)


@dataclass(frozen=True)
class Schedule:
    """The rule: a layer grows to one buffer above its budget and is compressed to some buffers
    below it, all heads at the same token.

    Attributes:
        sink, recent: tokens that stay as they are, the minimum size after a compression.
        given: the buffer in slots; None: 1/40 of the average head's budget, at least 1, at most 64.
        few_bits: the slots between sinks and recent tokens are stored in 8 or 4 bits, also if they
            fit the budget. Tokens since the last compression are in full precision.
        sketch: the method is a streaming sketch, which cannot return tokens.
        one_shot: only prompts are compressed.
    """

    sink: int
    recent: int
    given: int | None = None
    few_bits: bool = False
    sketch: bool = False
    one_shot: bool = False

    def buffer(self, budget: int) -> int:
        """The number of slots by which a layer may exceed the budget, from the average head's
        budget: a head with a small share would otherwise compress at every other token, and the
        limit is on the bytes of all heads."""
        return self.given or max(1, min(64, budget // 40))

    @property
    def period(self) -> int:
        """The number of buffers from one compression to the next."""
        return 2 if self.few_bits or self.sketch else 1 + _BELOW

    def least(self, budget: int | Tensor) -> int | Tensor:
        """The part of a budget that sinks and recent window take."""
        window = self.sink + self.recent
        return min(budget, window) if isinstance(budget, int) else budget.clamp(max=window)

    def recent_within(self, budget: int | Tensor) -> int | Tensor:
        """Recent tokens that are kept unchanged within a budget."""
        if isinstance(budget, int):
            return min(self.recent, budget - min(self.sink, budget))
        return (budget - budget.clamp(max=self.sink)).clamp(max=self.recent)

    def below(
        self, budget: int | Tensor, buffer: int, slot: float = 1.0, token: float = 1.0
    ) -> int | Tensor:
        """The size after a compression, from which a layer grows to one buffer above the budget.

        Args:
            slot, token: bytes of a slot in few bits, and of a token since the last compression,
                over those of a token of the budget.
        """
        above = math.ceil(buffer * (self.period * token - 1) / slot)
        less, least = budget - above, self.least(budget)
        if isinstance(less, int) and isinstance(least, int):
            return max(less, least, 1)
        both = (torch.as_tensor(each, device="cpu") for each in (less, least))
        return torch.maximum(*both).clamp(min=1)

    def rhythm(self, budget: int) -> Rhythm:
        """The tokens at which a layer is compressed that has read nothing yet, if all heads have
        the same ``budget``, which does not grow."""
        buffer = self.buffer(budget)
        kept = self.below(budget, buffer)
        assert isinstance(kept, int)
        every = budget + buffer - kept
        if not self.few_bits:
            return Rhythm(kept + every, every)
        window = min(kept, self.sink + self.recent)
        return Rhythm(window + every, every, kept - window)


def pieces(seen: int, tokens: int, piece: int) -> list[int]:
    """The sizes of the pieces of ``tokens`` tokens of a prompt, after ``seen`` others: they end at
    multiples of ``piece``, and with the tokens."""
    ends = [*range((seen // piece + 1) * piece, seen + tokens, piece), seen + tokens]
    return [end - start for start, end in zip([seen, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Rhythm:
    """When a layer is compressed: wherever it is full, and at the end of each piece of a prompt
    (``pieces``) that does not fit what a compression leaves. Both depend on the request alone:
    prompts come in several chunks, requests are preempted and read again, and several run in one
    batch.

    A layer of ``slots`` slots per KV head is full, and is compressed to ``slots - every``. A layer
    in two parts has ``middle`` more slots, on average over KV heads, for what is compressed.
    """

    slots: int
    every: int
    middle: int = 0

    @property
    def first(self) -> int:
        """Slots per KV head after a compression, without the middle."""
        return self.slots - self.every

    @property
    def kept(self) -> int:
        """Slots per KV head after a compression."""
        return self.first + self.middle

    def queries(self, window: int | None) -> int:
        """How many of the last queries before a compression it uses.

        Args:
            window: as ``Compressor.window``.
        """
        return min(self.every, window or self.every)
