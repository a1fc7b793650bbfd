"""SnapKV: scores by the attention of the prompt's last queries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvsketch.errors import InputError, at_least
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring, recent_attention
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class SnapKV(Scoring):
    """Keep the tokens that the last ``window`` queries attended to most, smoothed over their
    neighbours.

    A prompt's score is SnapKV's (section 4; the kept tokens are those of kvpress's SnapKVPress):
    attention of the last ``window`` queries over everything they see, averaged over them and over
    the query heads of each KV head, then average-pooled over ``kernel_size`` neighbours among the
    tokens before the window. The paper keeps the window itself: pass
    ``recent = window``.

    The paper compresses once. Here scores are carried over: if fewer than ``window`` queries come
    (a decoded token, a short chunk, a prompt shorter than the window), each has weight 1/window and
    all older ones fade by 1 - 1/window per query, so that the score stays an average over about the
    last ``window`` queries for any grouping. Neighbours are then the remaining slots.

    Args:
        window: number of last queries whose attention counts, >= 1. It may be longer than the
            prompt, see above.
        kernel_size: width of the pooling, odd and >= 1 (1: none). The authors' code and kvpress
            use 5.

    Raises:
        InputError: ``window`` or ``kernel_size`` out of range.
    """

    name = "snapkv"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (2404.14469)"
    requires = Requirements(queries=True, values=False, second_reading="allowed")
    window: int

    def __init__(self, window: int = 32, kernel_size: int = 5, seed: int = 0) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)
        self.kernel_size = at_least("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise InputError(f"kernel_size={kernel_size} must be odd, so that it has a middle")

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        received, fade = recent_attention(slots, observed, self.window)
        # Pooled separately, as in the paper, so that the window's own large scores do not affect
        # their neighbours.
        before = slots.count if observed.after else max(0, slots.count - self.window)
        parts = (received[..., :before], received[..., before:])
        score = torch.cat([self._pooled(part) for part in parts], dim=-1)
        return score if slots.score is None else score + slots.score * fade

    def _pooled(self, score: Tensor) -> Tensor:
        if self.kernel_size == 1 or score.shape[-1] == 0:
            return score
        return F.avg_pool1d(score, self.kernel_size, stride=1, padding=self.kernel_size // 2)
