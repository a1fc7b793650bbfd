"""Budgets by need: which heads hold the slots that matter most, told by the scores of a method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def by_need(
    scores: Sequence[Tensor], budget: int, sink: int, recent: int, safeguard: float = 0.0
) -> list[Tensor]:
    """How many slots each head gets if all heads together keep the slots of highest score (AdaKV,
    arXiv:2407.11550, Algorithm 1, within a layer; KVzip, arXiv:2505.23416, over all layers).

    Every head keeps its sinks and its recent window; what lies between competes.

    Args:
        scores: of every layer, float ``[heads, n]``, -inf for slots that are not there.
        budget: slots per head on average, sinks and recent window included.
        sink: first slots that a head keeps whatever their score.
        recent: last slots likewise.
        safeguard: every head keeps at least this share of the average budget, sinks and recent
            window included (as in kvpress's AdaKVPress; the authors' code shares out what lies
            between instead, and mixes counts where this fills up). 0: none.

    Returns:
        int64 ``[heads]`` for every layer; they sum to budget x heads x layers, or to all slots.
    """
    n = scores[0].shape[-1]
    first = min(sink, budget, n)
    last = min(recent, budget - first, n - first)
    between = torch.cat([layer[:, first : n - last] for layer in scores]).float()
    free = min(budget - first - last, between.shape[1])
    counts = torch.zeros(len(between), dtype=torch.int64)
    if free > 0:
        safe = min(int(budget * safeguard) - first - last, free)
        if safe > 0:
            best = between.topk(safe, dim=-1).indices
            between = between.scatter(-1, best, torch.inf)
        chosen = between.flatten().topk(free * len(between)).indices // between.shape[1]
        counts = torch.bincount(chosen, minlength=len(between)).cpu()
    return list(torch.split(counts + first + last, [len(layer) for layer in scores]))
