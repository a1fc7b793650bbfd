"""Grouping by k-means on keys, a block of slots at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import Groups

#: Keys are grouped within blocks of this many slots, so that the cost is linear in n.
_BLOCK = 2048


def group_keys(keys: Tensor, weight: Tensor, count: int, steps: int) -> Groups:
    """Group keys by weighted Lloyd iterations from seeds spread evenly over the live slots.

    Evenly spread seeds follow the density of the keys, and a few weighted steps move them where
    the weight is; farthest-first seeds cost count sequential steps and spend themselves on
    outliers.

    Args:
        keys: ``[R, n, d]``, float32 or float64.
        weight: ``[R, n]``, >= 0; slots of weight 0 are grouped, but pull no center.
        count: groups per head, 1 <= count < n.
        steps: Lloyd iterations, >= 0.
    """
    n = keys.shape[1]
    blocks = max(1, round(n / _BLOCK))
    # Integer edges that split slots and groups alike.
    edges = [n * i // blocks for i in range(blocks + 1)]
    firsts = [count * i // blocks for i in range(blocks + 1)]
    parts = []
    for i in range(blocks):
        part = slice(edges[i], edges[i + 1])
        size = firsts[i + 1] - firsts[i]
        if size == 0:  # fewer groups than blocks: they go to the group before
            parts.append(torch.full_like(weight[:, part], max(0, firsts[i] - 1)).long())
        else:
            parts.append(_lloyd(keys[:, part], weight[:, part], size, steps) + firsts[i])
    return Groups(torch.cat(parts, dim=1), count)


def _lloyd(keys: Tensor, weight: Tensor, count: int, steps: int) -> Tensor:
    rows, n, _ = keys.shape
    if count >= n:
        return torch.arange(n, device=keys.device).expand(rows, n)
    # Large norms would cost digits in |x|^2 - 2<x, c> + |c|^2.
    keys = keys - keys.mean(1, keepdim=True)
    live = (weight > 0).double()
    # Seeds: every (live / count)-th live slot.
    rank = live.cumsum(1)
    target = (torch.arange(count, device=keys.device) + 0.5) * rank[:, -1:] / count
    seed = torch.searchsorted(rank, target.clamp(min=0.5)).clamp(max=n - 1)
    centers = keys.gather(1, seed.unsqueeze(-1).expand(-1, -1, keys.shape[2]))
    groups = Groups(_nearest(keys, centers), count)
    for _ in range(steps):
        mass = groups.sum(weight.unsqueeze(-1))
        mean = groups.sum(keys * weight.unsqueeze(-1)) / mass.clamp(min=1e-30)
        centers = torch.where(mass > 0, mean, centers)
        groups = Groups(_nearest(keys, centers), count)
    # A row with room for all its live slots keeps each.
    return torch.where(rank[:, -1:] <= count, (rank.long() - 1).clamp(min=0), groups.index)


def _nearest(keys: Tensor, centers: Tensor) -> Tensor:
    norms = centers.square().sum(-1).unsqueeze(1)
    return torch.baddbmm(norms, keys, centers.transpose(1, 2), alpha=-2).argmin(-1)
