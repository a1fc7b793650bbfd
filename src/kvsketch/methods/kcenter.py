"""Greedy k-center on the keys, the method of SubGen's and ClusterGen's experiments."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..observed import causal
from ..slots import Slots
from .base import Compressor, keep_top
from .seen import Seen


class KCenter(Compressor):
    """Keep the centers of a greedy k-center clustering of the keys.

    This is a farthest-first traversal (Dyer and Frieze 1985; SubGen section 3.2): k centers are
    kept as exact tokens (u = v, m = 1), and the others are dropped.

    ``score`` is each center's insertion distance, its distance to the nearest center chosen before
    it. Distances decrease along a greedy traversal, so that dropping the smallest ones gives
    exactly the shorter traversal. A periodic recompression therefore needs no new traversal: the
    few new tokens (score 0) get their distance to all older tokens, and the smallest distances are
    dropped. This is SubGen's online rule (a new center only if it is farther than delta from all
    others), with delta set so that the budget is met. In a head of whose slots more than a quarter
    are new, the traversal is repeated.
    """

    name = "kcenter"
    paper = "Zandieh et al., SubGen section 3.2 (2402.06082)"
    ragged = True

    def reduce(self, slots: Slots, budget: int | Tensor, seen: Seen | None) -> Slots:
        live = slots.live()
        if isinstance(budget, Tensor) and live is not None:  # new slots are expected at the end
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


def _updated(score: Tensor, keys: Tensor, live: Tensor | None, budget: int | Tensor) -> Tensor:
    """Insertion distances if some slots have them already, except for slots at the end."""
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
    """The distance of each of the last ``fresh_count`` keys to the nearest key before it."""
    n = keys.shape[2]
    fresh = keys[:, :, n - fresh_count :]
    norms = keys.square().sum(-1)
    # |x - y|^2 from one matrix product is several times faster than cdist for few x.
    squared = norms.unsqueeze(2) - 2 * torch.matmul(fresh, keys.transpose(-1, -2))
    squared += norms[:, :, n - fresh_count :].unsqueeze(-1)
    if live is not None:
        squared.masked_fill_(~live.unsqueeze(2), torch.inf)
    # Among the new keys themselves only the earlier ones count.
    among = squared[..., n - fresh_count :]
    later = ~causal(fresh_count, fresh_count, keys.device)
    later.diagonal(dim1=-2, dim2=-1).fill_(True)
    among.masked_fill_(later, torch.inf)
    nearest = squared.amin(-1).clamp(min=1e-36)
    # A key without older live keys is far from everything. Its score must be finite.
    return torch.where(torch.isinf(nearest), 1e20, nearest.sqrt())
