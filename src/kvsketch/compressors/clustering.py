"""Weighted k-means on keys, a block at a time: what the merging methods group by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..slots import Slots

#: Keys are grouped within blocks of this many slots, so that the cost is linear in n.
_BLOCK = 2048


@dataclass(frozen=True)
class Groups:
    """A grouping of n slots per head into ``count`` groups.

    Attributes:
        index: int64 ``[R, n]``, R = batch x heads.
        count: groups; some may be empty.
    """

    index: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Sums over groups: ``[R, n, d]`` to ``[R, count, d]``."""
        shape = (values.shape[0], self.count, values.shape[2])
        index = self.index.unsqueeze(-1).expand_as(values)
        return values.new_zeros(shape).scatter_add_(1, index, values)


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


def merge(slots: Slots, groups: Groups, weight: Tensor, attended: bool = False) -> Slots:
    """One slot per group: the weighted mean key, the sum of u and of m; in the order of the groups'
    first members. Empty groups become dead slots, at the end.

    Args:
        slots: ``[batch, heads, n, ...]``.
        groups: of them.
        weight: float ``[R, n]``, > 0 for every live slot and 0 for the others.
        attended: weigh values (u / m) like keys and multiply by the group's mass, instead of
            summing u: better if the weight is the attention that slots get, since the sum is right
            for a query that looks at all members alike.
    """
    batch, heads, n = slots.keys.shape[:3]
    dtype = weight.dtype
    total = groups.sum(weight.unsqueeze(-1))
    safe = torch.where(total > 0, total, 1.0)
    mass = slots.masses().reshape(batch * heads, n, 1).to(dtype)
    mass_sum = groups.sum(mass)

    def mean(field: Tensor) -> Tensor:
        return groups.sum(field * weight.unsqueeze(-1)) / safe

    flat = {k: t.reshape(batch * heads, n, -1).to(dtype) for k, t in slots.tensors().items()}
    if attended:
        values = mean(flat["values"] / torch.where(mass > 0, mass, 1.0)) * mass_sum
    else:
        values = groups.sum(flat["values"])
    fields = {"keys": mean(flat["keys"]), "values": values, "mass": mass_sum}
    if "positions" in flat:
        fields["positions"] = mean(flat["positions"])
    if "score" in flat:
        fields["score"] = groups.sum(flat["score"])
    order = torch.full((batch * heads, groups.count), n, device=weight.device)
    place = torch.arange(n, device=weight.device).expand(batch * heads, n)
    place = torch.where(weight > 0, place, n)
    order = order.scatter_reduce_(1, groups.index, place, "amin").argsort(-1)
    merged = {}
    for name, field in fields.items():
        like = getattr(slots, name) if name != "mass" else slots.masses()
        field = field.gather(1, order.unsqueeze(-1).expand_as(field))
        shape = (batch, heads, groups.count, *like.shape[3:])
        merged[name] = field.reshape(shape).to(like.dtype)
    return Slots(**merged)
