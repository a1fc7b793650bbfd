"""Greedy k-center on the keys: what SubGen and ClusterGen ran in their experiments."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..slots import Slots, causal
from .base import Compressor, keep_top
from .seen import Seen


class KCenter(Compressor):
    """Keep the centers of a greedy k-center clustering of the keys.

    A farthest-first traversal (Dyer and Frieze 1985; SubGen section 3.2): k centers stay as exact
    tokens (u = v, m = 1), the rest is dropped.

    ``score`` holds each center's insertion distance, its distance to the nearest center chosen
    before it. Distances fall along a greedy traversal, so dropping the smallest ones gives exactly
    the shorter traversal. A periodic recompression therefore needs no new one: the few fresh
    tokens (score 0) get their distance to everything older and the smallest distances go. That is
    SubGen's online rule (a new center only if farther than delta from all) with delta set so that
    the budget is met. A head over a quarter of whose slots is fresh does the traversal anew.
    """

    name = "kcenter"
    paper = "Zandieh et al., SubGen section 3.2 (2402.06082)"
    ragged = True

    def reduce(self, slots: Slots, budget: int | Tensor, seen: Seen | None) -> Slots:
        live = slots.live()
        if isinstance(budget, Tensor) and live is not None:  # fresh slots are looked for at the end
            order = live.to(torch.uint8).argsort(dim=-1, stable=True)
            slots, live = slots.take(order), live.gather(-1, order)
        keys = slots.keys.float()
        if slots.score is None:
            distance = farthest_first(keys, live, budget)
        else:
            distance = _updated(slots.score, keys, live, budget)
        slots = replace(slots, score=distance)
        return keep_top(slots, distance, budget)


def farthest_first(keys: Tensor, live: Tensor | None, budget: int | Tensor) -> Tensor:
    """Insertion distances of a greedy traversal of ``budget`` steps that starts at the first live
    key (which gets a distance above all others); 0 for keys never chosen.

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
        # maximum: a row without live keys left chooses an old one again, at -inf
        inserted[rows, chosen] = torch.maximum(inserted[rows, chosen], distance)
        squared = torch.bmm(centers[rows, chosen].unsqueeze(1), points[:count]).squeeze(1)
        torch.minimum(nearest[:count], squared, out=nearest[:count])
        nearest[rows, chosen] = -torch.inf
    if order is not None:
        inserted = inserted.index_copy(0, order, inserted)
    # The first center has no center before it; any finite number above all distances will do.
    largest = inserted.masked_fill(torch.isinf(inserted), 0.0).amax(-1, keepdim=True)
    inserted = torch.where(inserted == torch.inf, 4 * largest + 1, inserted)
    # A chosen duplicate has distance 0 (or, rounded, less): keep it ahead of what was not chosen.
    inserted = torch.where(torch.isinf(inserted), 0.0, inserted.clamp(min=1e-36).sqrt())
    return inserted.reshape(batch, heads, n)


def _active_rows(budget: int | Tensor, rows: int, n: int) -> tuple[list[int], Tensor | None]:
    """How many rows still choose at each step, and the order of the rows (those of a large budget
    first) in which they are the first so many; None: as they are."""
    if isinstance(budget, int):
        return [rows] * min(budget, n), None
    order = budget.flatten().argsort(descending=True, stable=True)
    step = torch.arange(min(int(budget.max()), n), device=budget.device)
    return (budget.flatten() > step.unsqueeze(1)).sum(1).tolist(), order


def _updated(score: Tensor, keys: Tensor, live: Tensor | None, budget: int | Tensor) -> Tensor:
    """Insertion distances where some slots, but for those at the end, have theirs already."""
    n = score.shape[-1]
    scored = (score > 0).flip(-1)
    fresh = scored.to(torch.uint8).argmax(-1)  # slots at the end without a score
    fresh = torch.where(scored.any(-1), fresh, n)
    held: int | Tensor = n if live is None or isinstance(budget, int) else live.sum(-1)
    anew = 4 * fresh > held
    most = int(fresh.masked_fill(anew, 0).max())
    if most:
        distance = _distance_to_older(keys, live, most)
        mine = torch.arange(most, 0, -1, device=score.device) <= fresh.unsqueeze(-1)
        last = torch.where(mine, distance, score[..., n - most :])
        score = torch.cat([score[..., : n - most], last], dim=-1)
    if bool(anew.any()):
        some = None if live is None else live[anew].unsqueeze(0)
        steps = budget if isinstance(budget, int) else budget[anew].unsqueeze(0)
        distance = farthest_first(keys[anew].unsqueeze(0), some, steps)[0]
        score = score.masked_scatter(anew.unsqueeze(-1), distance)
    return score


def _distance_to_older(keys: Tensor, live: Tensor | None, fresh_count: int) -> Tensor:
    """Distance of each of the last ``fresh_count`` keys to the nearest key before it."""
    n = keys.shape[2]
    fresh = keys[:, :, n - fresh_count :]
    norms = keys.square().sum(-1)
    # |x - y|^2 by one product: several times faster than cdist for few x
    squared = norms.unsqueeze(2) - 2 * torch.matmul(fresh, keys.transpose(-1, -2))
    squared += norms[:, :, n - fresh_count :].unsqueeze(-1)
    if live is not None:
        squared.masked_fill_(~live.unsqueeze(2), torch.inf)
    # Among the fresh keys themselves only the earlier ones are older.
    among = squared[..., n - fresh_count :]
    later = ~causal(fresh_count, fresh_count, keys.device)
    later.diagonal(dim1=-2, dim2=-1).fill_(True)
    among.masked_fill_(later, torch.inf)
    nearest = squared.amin(-1).clamp(min=1e-36)
    # No older live key: far from everything; scores must stay finite.
    return torch.where(torch.isinf(nearest), 1e20, nearest.sqrt())
