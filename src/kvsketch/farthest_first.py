"""The greedy traversal of k-center, farthest first."""

from __future__ import annotations

import torch
from torch import Tensor


def farthest_first(keys: Tensor, live: Tensor | None, budget: int | Tensor) -> Tensor:
    """Insertion distances of a greedy traversal of ``budget`` steps that starts at the first live
    key (which gets a distance above all others), or 0 for keys that are not chosen.

    Args:
        keys: float ``[batch, heads, n, head_dim]``.
        live: bool ``[batch, heads, n]`` or None.
        budget: one for all heads, or int64 ``[batch, heads]``.
    """
    batch, heads, n, dim = keys.shape
    flat = keys.reshape(batch * heads, n, dim)
    active, order = _active_rows(budget, batch * heads, n)
    if order is not None:
        flat = flat[order]
    norms = flat.square().sum(-1, keepdim=True)
    ones = torch.ones_like(norms)
    # |x - c|^2 as one product: (-2x, |x|^2, 1) . (c, 1, |c|^2)
    points = torch.cat([-2 * flat, norms, ones], dim=-1).transpose(1, 2).contiguous()
    centers = torch.cat([flat, ones, norms], dim=-1)
    nearest = torch.full_like(norms.squeeze(-1), torch.inf)
    if live is not None:
        there = live.reshape(batch * heads, n)
        nearest.masked_fill_(~(there if order is None else there[order]), -torch.inf)
    inserted = torch.full_like(nearest, -torch.inf)
    for count in active:
        rows = torch.arange(count, device=keys.device)
        distance, chosen = nearest[:count].max(-1)
        # The maximum is used because a row whose live keys are all chosen chooses one again, at
        # -inf.
        inserted[rows, chosen] = torch.maximum(inserted[rows, chosen], distance)
        squared = torch.bmm(centers[rows, chosen].unsqueeze(1), points[:count]).squeeze(1)
        torch.minimum(nearest[:count], squared, out=nearest[:count])
        nearest[rows, chosen] = -torch.inf
    if order is not None:
        inserted = inserted.index_copy(0, order, inserted)
    # The first center has no earlier center. Its distance is a finite number above all others.
    largest = inserted.masked_fill(torch.isinf(inserted), 0.0).amax(-1, keepdim=True)
    inserted = torch.where(inserted == torch.inf, 4 * largest + 1, inserted)
    # A chosen duplicate has distance 0 (or less, by rounding). Keep it above the keys that were not
    # chosen.
    inserted = torch.where(torch.isinf(inserted), 0.0, inserted.clamp(min=1e-36).sqrt())
    return inserted.reshape(batch, heads, n)


def _active_rows(budget: int | Tensor, rows: int, n: int) -> tuple[list[int], Tensor | None]:
    """How many rows still choose a center at each step, and the order of rows (by decreasing
    budget) in which these are the first. None: the given order."""
    if isinstance(budget, int):
        return [rows] * min(budget, n), None
    order = budget.flatten().argsort(descending=True, stable=True)
    step = torch.arange(min(int(budget.max()), n), device=budget.device)
    return (budget.flatten() > step.unsqueeze(1)).sum(1).tolist(), order
