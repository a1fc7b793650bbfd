"""Grouping of slots by k-means on their keys, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods.groups import Groups

#: Keys are grouped within blocks of this many slots, so that the cost is linear in n.
_BLOCK = 2048


def group_keys(
    keys: Tensor, weight: Tensor, count: int | Tensor, steps: int, sizes: Tensor | None = None
) -> Groups:
    """Group keys by weighted Lloyd iterations from seeds spread evenly over the live slots.

    Evenly spread seeds follow the density of the keys, and a few weighted steps move them to where
    the weight is. Farthest-first seeds would take ``count`` sequential steps, and most of them
    would be outliers.

    Args:
        keys: ``[R, n, d]``, float32 or float64.
        weight: ``[R, n]``, >= 0. Slots of weight 0 are grouped, but do not move a center.
        count: groups per row, 1 <= count <= n, or int64 ``[R]``.
        steps: Lloyd iterations, >= 0.
        sizes: the number of slots that belong to a row, int64 ``[R]``. They are the first ones. The
            groups of the others are undefined. None: all.
    """
    rows, n, _ = keys.shape
    most = count if isinstance(count, int) else int(count.max())
    counts = torch.as_tensor(count, device=keys.device).expand(rows)
    sizes = torch.full_like(counts, n) if sizes is None else sizes
    blocks = (sizes / _BLOCK).round().long().clamp(min=1)
    index = torch.zeros_like(weight, dtype=torch.int64)
    for i in range(int(blocks.max())):
        # Integer edges that split slots and groups in the same proportion.
        first, end = sizes * i // blocks, sizes * (i + 1) // blocks
        group, after = counts * i // blocks, counts * (i + 1) // blocks
        here = i < blocks
        part = here & (after > group)
        if bool(part.any()):
            _fill(index, keys, weight, part, (first, end), (group, after), steps)
        # With fewer groups than blocks, slots of a block without a group join the group before.
        some = (here & ~part).nonzero().squeeze(1)
        if len(some):
            column = torch.arange(n, device=keys.device)
            mine = (column >= first[some, None]) & (column < end[some, None])
            before = (group[some, None] - 1).clamp(min=0)
            index[some] = torch.where(mine, before, index[some])
    return Groups(index, most)


def _fill(
    index: Tensor,
    keys: Tensor,
    weight: Tensor,
    part: Tensor,
    slots: tuple[Tensor, Tensor],
    groups: tuple[Tensor, Tensor],
    steps: int,
) -> None:
    """Group one block of each row in ``part`` (bool ``[R]``) and write the groups to ``index``."""
    rows = part.nonzero().squeeze(1)
    first, size = slots[0][rows, None], (slots[1] - slots[0])[rows, None]
    column = torch.arange(int(size.max()), device=keys.device)
    real = column < size
    at = first + torch.where(real, column, 0)
    mine = keys[rows].gather(1, at.unsqueeze(-1).expand(-1, -1, keys.shape[2]))
    if not bool(real.all()):
        mine = mine * real.unsqueeze(-1)
    found = _lloyd(
        mine, weight[rows].gather(1, at) * real, (groups[1] - groups[0])[rows], size, steps
    )
    row = rows.unsqueeze(1).expand_as(at)
    index[row[real], at[real]] = (found + groups[0][rows, None])[real]


def _lloyd(keys: Tensor, weight: Tensor, count: Tensor, size: Tensor, steps: int) -> Tensor:
    """Group the first ``size`` (``[r, 1]``) slots of each row into ``count`` (``[r]``) groups."""
    rows, n, dim = keys.shape
    most, column = int(count.max()), torch.arange(n, device=keys.device).expand(rows, n)
    # Large norms would cost digits in |x|^2 - 2<x, c> + |c|^2.
    keys = keys - (keys.sum(1) / size).unsqueeze(1)
    live = (weight > 0).double()
    # Seeds: every (live / count)-th live slot.
    rank = live.cumsum(1)
    target = (torch.arange(most, device=keys.device) + 0.5) * rank[:, -1:] / count.unsqueeze(1)
    seed = torch.searchsorted(rank, target.clamp(min=0.5)).clamp(max=n - 1)
    centers = keys.gather(1, seed.unsqueeze(-1).expand(-1, -1, dim))
    absent = torch.arange(most, device=keys.device) >= count.unsqueeze(1)
    for step in range(steps + 1):
        index, total, mass = assigned(keys, centers, absent, weight)
        if step < steps:
            centers = torch.where(mass > 0, total / mass.clamp(min=1e-30), centers)
    # In a row with at least as many groups as live slots, each live slot is a group.
    alone = torch.where(rank[:, -1:] <= count.unsqueeze(1), (rank.long() - 1).clamp(min=0), index)
    return torch.where(count.unsqueeze(1) >= size, column, alone)


def assigned(
    keys: Tensor, centers: Tensor, absent: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest center of every key, or the first of equally near ones.

    Args:
        keys: ``[R, n, d]``.
        centers: ``[R, c, d]``.
        absent: bool ``[R, c]``, the centers that do not exist.
        weight: the weights of the keys in the sums, ``[R, n]``.

    Returns:
        The index of each key's center, int64 ``[R, n]``, the sums of weight times key, ``[R, c,
        d]``, and the sums of weights, ``[R, c, 1]``.
    """
    norms = centers.square().sum(-1).masked_fill_(absent, torch.inf).unsqueeze(1)
    index = torch.baddbmm(norms, keys, centers.transpose(1, 2), alpha=-2).argmin(-1)
    groups = Groups(index, centers.shape[1])
    return index, groups.sum(keys * weight.unsqueeze(-1)), groups.sum(weight.unsqueeze(-1))
