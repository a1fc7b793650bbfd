"""Budgets by need: computed from the scores of a method, compared over heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsketch.cache.curves import spend


def by_need(
    scores: Sequence[Tensor], budget: int, sink: int, recent: int, safeguard: float = 0.0
) -> list[Tensor]:
    """The number of slots of each head if all heads together keep the slots of highest score
    (AdaKV, arXiv:2407.11550, Algorithm 1, within a layer; KVzip, arXiv:2505.23416, over all
    layers).

    Every head keeps its sinks and its recent window; the other slots compete.

    Args:
        scores: of every layer, float ``[heads, n]``, -inf for slots that are not there; n may
            differ.
        budget: slots per head on average, including sinks and recent window.
        sink: number of first slots that a head keeps regardless of their score.
        recent: the same for last slots.
        safeguard: every head keeps at least this share of the average budget, including sinks and
            recent window (as in kvpress's AdaKVPress; the authors' code shares out what lies
            between instead, and mixes counts where this fills up). 0: none.

    Returns:
        int64 ``[heads]`` for every layer; they sum to budget x heads x layers, or to all slots.
        What no slot needs is the same for all heads.
    """
    n = max(layer.shape[-1] for layer in scores)
    first = min(sink, budget, n)
    last = min(recent, budget - first, n - first)
    between = torch.cat(
        [
            pad(competing(layer, first, last), (n - layer.shape[-1], 0), value=-torch.inf)
            for layer in scores
        ]
    ).float()
    free = min(budget - first - last, n - first - last)
    counts = torch.zeros(len(between), dtype=torch.int64, device="cpu")
    if free > 0:
        safe = min(int(budget * safeguard) - first - last, free)
        if safe > 0:
            best = between.topk(safe, dim=-1).indices
            between = between.scatter(-1, best, torch.inf)
        best, chosen = between.flatten().topk(free * len(between))
        chosen = chosen[best > -torch.inf] // n
        counts = torch.bincount(chosen, minlength=len(between)).cpu()
        counts += (free * len(between) - len(chosen)) // len(between)  # which no slot needs
    return list(torch.split(counts + first + last, [len(layer) for layer in scores]))


def competing(scores: Tensor, sink: int, recent: int) -> Tensor:
    """``scores`` ``[..., n]`` with -inf for the first and the last slots that are there."""
    there = scores > -torch.inf
    number = there.cumsum(-1)
    between = there & (number > sink) & (number <= number[..., -1:] - recent)
    return scores.masked_fill(~between, -torch.inf)


def by_variance(scores: Sequence[Tensor], budget: int, window: int) -> list[Tensor]:
    """The number of slots of the heads of each layer if layers whose attention is spread evenly
    over tokens keep more than those in which few tokens get most of it (D2O, arXiv:2406.13035,
    section 3).

    A layer has weight exp(-F), where F is the variance over tokens of their total received
    attention, scaled to [0, 1] over the heads of the layer, and averaged over them (as in the
    authors' code). Sinks and recent window are the same everywhere; the rest is allocated by these
    weights, and budget that a layer cannot use goes to the others, so that the total is unchanged.

    Args:
        scores: of every layer, float ``[heads, n]``, -inf for slots that are not there.
        budget: slots per head on average, the window included.
        window: sinks and recent window.

    Returns:
        int64 ``[heads]`` for every layer, the same for all its heads.
    """
    n = scores[0].shape[-1]
    weight = torch.stack([(-_spread(layer)).exp() for layer in scores])
    window = min(window, budget, n)
    free = torch.full_like(weight, n - window)
    total = float(min(budget - window, n - window) * len(weight))
    shared = spend(weight / weight.sum() * total, total, free) if total else 0 * weight
    counts = (shared + 1e-6).floor().long() + window
    return [count.expand(len(layer)) for count, layer in zip(counts, scores, strict=True)]


def _spread(score: Tensor) -> Tensor:
    """A layer's F, float64, in [0, 1]."""
    there = torch.isfinite(score)
    count = there.sum(-1)
    held = torch.where(there, score, 0.0).double()
    away = torch.where(there, held - (held.sum(-1) / count).unsqueeze(-1), 0.0)
    variance = (away.square().sum(-1) / (count - 1).clamp(min=1)).cpu()
    low, high = variance.aminmax()
    return ((variance - low) / (high - low + 1e-6)).mean()
