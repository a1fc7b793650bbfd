"""What the merging methods group by, a block at a time: the cheapest pairs, or k-means on keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..slots import Slots

#: Keys are grouped within blocks of this many slots, so that the cost is linear in n.
_BLOCK = 2048
#: Pairs are looked for within smaller ones: no worse, and less to compute.
_PAIR_BLOCK = 256
# Costs of pairs formed at a time, few enough to stay near the cache; and the width of the first of
# two levels in which their least is found: torch's argmin takes ten times as long as its amin.
_BLOCK_COSTS = 1 << 17
_WIDTH = 32
# How much values count beside keys when pairs are chosen.
_VALUES = 0.25


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


def check_pairs(pairs: float) -> float:
    """``pairs`` if it is a share that ``group_closest`` can take, or 0.

    Raises:
        InputError: it is not in [0, 1/2].
    """
    if not 0 <= pairs <= 0.5:
        raise InputError(f"pairs={pairs!r} must lie in [0, 0.5]")
    return pairs


def group(
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    price: Tensor,
    count: int,
    steps: int,
    share: float,
) -> Groups:
    """``group_closest`` with weights ``price``, or where that finds too few or ``share`` is 0,
    ``group_keys`` with weights ``weight``. Arguments as theirs."""
    closest = group_closest(keys, values, price, count, share) if share else None
    return group_keys(keys, weight, count, steps) if closest is None else closest


def group_closest(
    keys: Tensor, values: Tensor, weight: Tensor, count: int, share: float
) -> Groups | None:
    """Group keys, with their values beside them, by merging the closest in rounds, each of which
    leaves all but ``share`` of the slots (``group_pairs``): a full page that is only a little too
    full takes one round, a prompt several.

    Merging two slots errs by how far apart their keys are times how far apart their values are, so
    that equal keys are not yet a good pair: values count, scaled to the keys' spread, for a
    quarter.

    Args:
        keys: ``[R, n, d]``, float32 or float64.
        values: u / m, ``[R, n, value_dim]`` in the same dtype.
        weight: ``[R, n]``, as for ``group_pairs``.
        count: groups per row, 1 <= count < n.
        share: in (0, 1/2].

    Returns:
        None if ``group_pairs`` found too few in some round.
    """
    points = torch.cat([keys, values], dim=-1)
    live = (weight > 0).unsqueeze(-1)
    dead = not bool(live.all())
    if dead:
        points *= live
    # Large norms would cost digits in |x|^2 - 2<x, y> + |y|^2.
    points -= points.sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp(min=1)
    if dead:
        points *= live
    dim = keys.shape[2]
    spread = [
        torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        for x in (points[..., :dim], points[..., dim:])
    ]
    points[..., dim:] *= _VALUES**0.5 * spread[0] / spread[1].clamp(min=1e-30)
    index = None
    while True:
        n = points.shape[1]
        left = max(count, n - max(1, int(share * n)))
        groups = group_pairs(points, weight, left)
        if groups is None:
            return None
        index = groups.index if index is None else groups.index.gather(1, index)
        if left == count:
            return Groups(index, count)
        total = groups.sum(weight.unsqueeze(-1))
        points = groups.sum(points * weight.unsqueeze(-1)) / total.clamp(min=1e-30)
        weight = total.squeeze(-1)


def group_pairs(points: Tensor, weight: Tensor, count: int) -> Groups | None:
    """Group by merging only the closest: n - count edges of the nearest-neighbour forest.

    What it costs to merge two slots is what k-means loses by it (Ward 1963): m1 m2 / (m1 + m2)
    |x1 - x2|^2 for weights m. Each slot points to its cheapest partner within its block; an edge
    counts only if it leads to a slot whose own (cost, index) is less, so that there are no cycles;
    the cheapest edges are taken, and what hangs together is one group.

    Args:
        points: ``[R, n, d]``, float32 or float64; the mean should be near 0.
        weight: ``[R, n]``, >= 0. Slots of weight 0 go first, and are grouped with no other while
            groups are left.
        count: groups per row, 1 <= count < n.

    Returns:
        None if some row's forest has too few edges: more than half its slots must go, or many
        costs are equal.
    """
    rows, n, _ = points.shape
    live = weight > 0
    total = live.sum(1, keepdim=True)
    wanted = (total - count).clamp(min=0)
    cost, partner = _cheapest(points, weight)
    own = torch.arange(n, device=points.device).expand(rows, n)
    theirs = cost.gather(1, partner)
    falling = (theirs < cost) | ((theirs == cost) & (partner < own))
    price = cost.masked_fill(~falling, torch.inf)
    cheapest, index = price.topk(n - count, largest=False, sorted=True)
    taken = torch.arange(n - count, device=points.device) < wanted
    if bool((taken & torch.isinf(cheapest)).any()):
        return None
    taken = torch.zeros_like(live).scatter_(1, index, taken)
    root = torch.where(taken, partner, own)
    for _ in range((n - count).bit_length()):  # no path has more than n - count edges
        root = root.gather(1, root)
    number = (live & ~taken).cumsum(1) - 1
    spare = (total - wanted).clamp(max=count - 1)
    return Groups(torch.where(live, number.gather(1, root), spare), count)


def _cheapest(points: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What merging each slot with its cheapest partner costs (infinite for slots of weight 0 and
    for one alone), and which that is, both ``[R, n]``."""
    rows, n, _ = points.shape
    blocks = max(1, round(n / _PAIR_BLOCK))
    each = -(-n // blocks)
    folds = -(-each // _WIDTH)
    size, whole = folds * _WIDTH, n // each

    def blocked(x: Tensor) -> Tensor:
        """Blocks as rows, filled up with 0."""
        out = x.new_zeros(rows, blocks, size, x.shape[2])
        out[:, :whole, :each] = x[:, : whole * each].reshape(rows, whole, each, -1)
        if whole < blocks:
            out[:, whole, : n - whole * each] = x[:, whole * each :]
        return out.flatten(0, 1)

    points, weight = blocked(points), blocked(weight.unsqueeze(-1)).squeeze(-1)
    live = weight > 0
    norms = torch.linalg.vector_norm(points, dim=-1).square().masked_fill(~live, torch.inf)
    inverse = 1 / torch.where(live, weight, 1.0).clamp(min=1e-30)
    step = max(1, _BLOCK_COSTS // size**2, len(live) // 128)
    parts = [torch.split(x, step) for x in (points, norms, inverse)]
    costs, partners = [], []
    for x, norm, extra in zip(*parts, strict=True):
        cost = torch.baddbmm(norm.unsqueeze(1), x, x.mT, alpha=-2)
        cost += norm.unsqueeze(2)
        cost /= extra.unsqueeze(2) + extra.unsqueeze(1)
        cost.diagonal(0, 1, 2).fill_(torch.inf)
        # Column j is (j // _WIDTH, j % _WIDTH): the least over the former, then over the latter.
        folded = cost.view(*cost.shape[:2], folds, _WIDTH)
        low, column = folded.amin(2).min(-1)
        at = column[..., None, None].expand(-1, -1, folds, 1)
        partners.append(folded.gather(3, at).squeeze(3).argmin(-1) * _WIDTH + column)
        costs.append(low)
    start = each * torch.arange(blocks, device=points.device).view(1, -1, 1)
    partner = torch.cat(partners).view(rows, blocks, -1)[..., :each] + start
    found = torch.cat(costs).view(rows, blocks, -1)[..., :each]
    # Costs below 0 are rounding; a slot without partners may have found one beyond the end.
    cost = found.reshape(rows, -1)[:, :n].clamp(min=0.0)
    return cost, partner.reshape(rows, -1)[:, :n].clamp(max=n - 1)


def merge(
    slots: Slots,
    groups: Groups,
    weight: Tensor,
    attended: bool = False,
    factor: Tensor | None = None,
) -> Slots:
    """One slot per group: the weighted mean key, the sum of u and of m; in the order of the groups'
    first members. Empty groups become dead slots, at the end.

    Args:
        slots: ``[batch, heads, n, ...]``.
        groups: of them.
        weight: float ``[R, n]``, > 0 for every live slot and 0 for the others.
        attended: weigh values (u / m) like keys and multiply by the group's mass, instead of
            summing u: better if the weight is the attention that slots get, since the sum is right
            for a query that looks at all members alike.
        factor: of each group's u and m, ``[R, count]``; None: 1.
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
    if factor is not None:
        values, mass_sum = values * factor.unsqueeze(-1), mass_sum * factor.unsqueeze(-1)
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
