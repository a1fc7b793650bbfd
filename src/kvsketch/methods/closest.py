"""Grouping by merging the closest slots, in rounds, a block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import Groups

#: Pairs are looked for within smaller ones: no worse, and less to compute.
_PAIR_BLOCK = 256
# Costs of pairs formed at a time, few enough to stay near the cache.
_BLOCK_COSTS = 1 << 17
#: What ``least`` takes the columns of a table by.
WIDTH = 32
# How much values count beside keys when pairs are chosen.
_VALUES = 0.25


def group_closest(
    keys: Tensor, values: Tensor, weight: Tensor, count: int, share: float
) -> tuple[Groups, Tensor]:
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
        The groups, and bool ``[R]``: False for a row in which ``group_pairs`` found too few in
        some round, whose groups mean nothing.
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
    index = found = None
    while True:
        n = points.shape[1]
        left = max(count, n - max(1, int(share * n)))
        groups, enough = group_pairs(points, weight, left)
        index = groups.index if index is None else groups.index.gather(1, index)
        found = enough if found is None else found & enough
        if left == count or not bool(found.any()):
            return Groups(index, count), found
        total = groups.sum(weight.unsqueeze(-1))
        # In place: for a long prompt most of the time goes into memory never used before.
        points = groups.sum(points.mul_(weight.unsqueeze(-1))).div_(total.clamp(min=1e-30))
        weight = total.squeeze(-1)


def group_pairs(points: Tensor, weight: Tensor, count: int) -> tuple[Groups, Tensor]:
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
        The groups, and bool ``[R]``: False for a row whose forest has too few edges, because more
        than half its slots must go or many costs are equal; its groups mean nothing.
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
    found = ~(taken & torch.isinf(cheapest)).any(1)
    taken = torch.zeros_like(live).scatter_(1, index, taken)
    root = torch.where(taken, partner, own)
    for _ in range((n - count).bit_length()):  # no path has more than n - count edges
        root = root.gather(1, root)
    number = (live & ~taken).cumsum(1) - 1
    spare = (total - wanted).clamp(max=count - 1)
    group = torch.where(live, number.gather(1, root), spare)
    # Without enough edges a path may be a circle, which leads to no group.
    return Groups(torch.where(found.unsqueeze(1), group, 0), count), found


def _cheapest(points: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What merging each slot with its cheapest partner costs (infinite for slots of weight 0 and
    for one alone), and which that is, both ``[R, n]``."""
    rows, n, _ = points.shape
    blocks = max(1, round(n / _PAIR_BLOCK))
    each = -(-n // blocks)
    size, whole = -(-each // WIDTH) * WIDTH, n // each

    def blocked(x: Tensor) -> Tensor:
        """Blocks as rows, filled up with 0."""
        out = x.new_empty(rows, blocks, size, x.shape[2])
        out[:, :, each:] = 0
        out[:, :whole, :each] = x[:, : whole * each].reshape(rows, whole, each, -1)
        out[:, whole:] = 0
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
        low, column = least(cost)
        partners.append(column)
        costs.append(low)
    start = each * torch.arange(blocks, device=points.device).view(1, -1, 1)
    partner = torch.cat(partners).view(rows, blocks, -1)[..., :each] + start
    found = torch.cat(costs).view(rows, blocks, -1)[..., :each]
    # Costs below 0 are rounding; a slot without partners may have found one beyond the end.
    cost = found.reshape(rows, -1)[:, :n].clamp(min=0.0)
    return cost, partner.reshape(rows, -1)[:, :n].clamp(max=n - 1)


def least(table: Tensor) -> tuple[Tensor, Tensor]:
    """The least of every row of ``[R, n, m]``, m a multiple of ``WIDTH``, and its column: in two
    levels, since torch's argmin takes ten times as long as its amin."""
    # Column j is (j // WIDTH, j % WIDTH): the least over the former, then over the latter.
    folded = table.view(*table.shape[:2], -1, WIDTH)
    low, column = folded.amin(2).min(-1)
    at = column[..., None, None].expand(-1, -1, folded.shape[2], 1)
    return low, folded.gather(3, at).squeeze(3).argmin(-1) * WIDTH + column
