"""SnapKV: what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError, at_least
from ..slots import Observed, Slots, attention_received, check_queries
from .base import Compressor, keep_top


class SnapKV(Compressor):
    """Keep the tokens that the last ``window`` queries attended to most, smoothed over their
    neighbours.

    A prompt's score is SnapKV's (section 4; the kept tokens are those of kvpress's SnapKVPress):
    attention of the last ``window`` queries over everything they see, averaged over them and over
    the query heads of each KV head, then average-pooled over ``kernel_size`` neighbours among the
    tokens before the window. The paper keeps the window itself: give the wrapper
    ``recent = window``.

    The paper compresses once. Here scores live on: where fewer than ``window`` queries come (a
    decoded token, a short chunk, a prompt shorter than the window), each weighs 1/window and all
    older ones fade by 1 - 1/window per query, so that the score stays an average over about the
    last ``window`` queries, however they are grouped. Neighbours are then the slots still held.

    Args:
        window: queries that vote, >= 1. A longer window than the prompt is no error: see above.
        kernel_size: width of the pooling, odd and >= 1 (1: none). The authors' code and kvpress
            use 5.

    Raises:
        InputError: ``window`` or ``kernel_size`` out of range.
    """

    name = "snapkv"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (2404.14469)"
    needs_queries = True
    window: int

    def __init__(self, window: int = 32, kernel_size: int = 5, seed: int = 0) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)
        self.kernel_size = at_least("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise InputError(f"kernel_size={kernel_size} must be odd, so that it has a middle")

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            return scored_before(slots, self.name)
        received, fade = recent_attention(slots, observed, self.window)
        # Pooled apart, as in the paper: the window's own large scores must not spill over.
        before = max(0, slots.count - self.window)
        parts = (received[..., :before], received[..., before:])
        score = torch.cat([self._pooled(part) for part in parts], dim=-1)
        if slots.score is not None:
            score += slots.score * fade
        return replace(slots, score=score)

    def compress(self, slots: Slots, budget: int) -> Slots:
        score = scored_before(slots, self.name).score
        assert score is not None
        return keep_top(slots, score, budget)

    def _pooled(self, score: Tensor) -> Tensor:
        if self.kernel_size == 1 or score.shape[-1] == 0:
            return score
        return F.avg_pool1d(score, self.kernel_size, stride=1, padding=self.kernel_size // 2)


def scored_before(slots: Slots, name: str) -> Slots:
    """``slots`` if they carry a score.

    Raises:
        InputError: they do not, so queries were never seen.
    """
    if slots.score is None:
        raise InputError(f"{name} needs queries: pass observed=Observed(queries, scaling)")
    return slots


def query_weights(observed: Observed, window: int) -> tuple[Tensor, Tensor]:
    """How much each query counts in an average over about the last ``window`` ones.

    Returns:
        weights, float32 ``[batch, q]``: 1/window for each of a row's last ``window`` live queries;
        with fewer live ones, (1 - 1/window)^(live queries after it) / window.
        fade, float32 ``[batch, 1, 1]``: what is left of an earlier score, 0 once the window is
        full.
    """
    queries = observed.queries
    if observed.live is None:
        live = torch.ones(queries.shape[0], queries.shape[2], device=queries.device)
    else:
        live = observed.live.float()
    newer = live.flip(-1).cumsum(-1).flip(-1) - live
    count = live.sum(-1, keepdim=True)
    full = count >= window
    keep = 1 - 1 / window
    weights = torch.where(full, (newer < window).float(), keep**newer) * live / window
    fade = torch.where(full, 0.0, keep**count)
    return weights, fade.unsqueeze(-1)


def recent_attention(slots: Slots, observed: Observed, window: int) -> tuple[Tensor, Tensor]:
    """Attention each slot received on average from the last ``window`` queries.

    Each query looks at the slots up to its own (causal); a slot of mass m receives
    m exp(score) / total. Never forms more than a block of queries x slots.

    Returns:
        The average over queries (``query_weights``) and over the query heads of each KV head,
        float32 ``[batch, num_key_value_heads, slots]``; and the weight that an earlier score
        keeps, ``[batch, 1, 1]``.

    Raises:
        InputError: queries that do not fit the keys.
    """
    check_queries(observed.queries, slots, observed.slopes)
    weights, fade = query_weights(observed, window)
    counted = (weights != 0).any(0).nonzero()
    if not len(counted):
        return torch.zeros(slots.keys.shape[:3], device=slots.keys.device), fade
    start = int(counted[0])  # what lies before it has no say in any row
    live = None if observed.live is None else observed.live[:, start:]
    late = replace(observed, queries=observed.queries[:, :, start:], live=live)
    group = observed.queries.shape[1] // slots.keys.shape[1]
    received = attention_received(slots, late, weights[:, start:]).float() / group
    return received, fade
