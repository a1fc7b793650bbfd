"""Greedy k-center on the keys, the method of SubGen's and ClusterGen's experiments."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.farthest_first import farthest_first
from kvsketch.methods.base import Compressor, keep_top
from kvsketch.observed import causal
from kvsketch.slots import Slots


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

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
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
