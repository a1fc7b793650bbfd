"""The cheapest partner of every slot, a block of slots at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .least import WIDTH, least
from .points import Points

#: Pairs are looked for within smaller ones: no worse, and less to compute.
_PAIR_BLOCK = 256
# Costs of pairs formed at a time, few enough to stay near the cache.
_BLOCK_COSTS = 1 << 18
# Blocks have a multiple of so many slots: products of matrices of such sizes are faster.
_WIDTH = 8


@dataclass(frozen=True)
class Blocks:
    """Every row's slots in blocks of about 256, the last of a row shorter.

    Attributes:
        column: int64 ``[b, s]``: columns of the slots in the table of all rows, ``row * width +
            column``; that of a block's first slot where ``real`` is False.
        real: bool ``[b, s]``.
        first: int64 ``[b, 1]``: the column of a block's first slot within its row.
        row: int64 ``[b]``: which row it is of.
    """

    column: Tensor
    real: Tensor
    first: Tensor
    row: Tensor

    @staticmethod
    def of(rows: Tensor, sizes: Tensor, width: int) -> Blocks:
        """Blocks of some rows (int64 ``[r]``) that have ``sizes`` (``[r]``) slots each, of rows of
        ``width`` columns."""
        count = (sizes / _PAIR_BLOCK).round().long().clamp(min=1)
        each = -(-sizes // count)
        count = -(-sizes // each)  # rounded up, so many blocks of so many would end behind a row
        most = -(-int(each.max()) // _WIDTH) * _WIDTH
        number = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
        row, each, size = rows[number], each[number], sizes[number]
        before = (count.cumsum(0) - count)[number]
        first = (torch.arange(len(row), device=rows.device) - before) * each
        place = torch.arange(most, device=rows.device)
        real = place < torch.minimum(each, size - first).unsqueeze(1)
        column = (row * width + first).unsqueeze(1) + place * real
        return Blocks(column, real, first.unsqueeze(1), row)


def cheapest(
    points: Points, places: Tensor, weight: Tensor, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """What merging each slot with its cheapest partner in its block costs: m1 m2 / (m1 + m2)
    |x1 - x2|^2 for weights m (Ward 1963).

    Args:
        points: of the slots.
        places: where a slot's point is, int64 ``[R, width]``.
        weight: ``[R, width]``, >= 0.
        blocks: of the columns.

    Returns:
        Costs ``[R, width]``, infinite for slots of weight 0, for one alone and outside all blocks,
        and each slot's partner, int64 ``[R, width]``, a column.
    """
    rows, width = weight.shape
    mine = weight.flatten()[blocks.column] * blocks.real
    live = mine > 0
    per_weight = torch.where(live, mine, 1.0).clamp_(min=1e-30).reciprocal_()
    absent = torch.zeros_like(mine).masked_fill_(~live, torch.inf)
    low, partner = torch.empty_like(mine), torch.empty_like(blocks.column)
    size = mine.shape[1]
    step = max(1, _BLOCK_COSTS // size**2, len(mine) // 128)
    some = points.blocks(blocks.row, places.flatten()[blocks.column], step)
    # Memory that was used before is several times faster than fresh one.
    table, other = (mine.new_empty(min(step, len(mine)), size, size) for _ in range(2))
    parts = (torch.split(x, step) for x in (per_weight, absent, low, partner))
    for x, extra, added, lowest, which in zip(some, *parts, strict=True):
        norm = torch.linalg.vector_norm(x, dim=-1)
        norm = torch.addcmul(added, norm, norm)
        if len(x) < len(table):
            table, other = table[: len(x)], other[: len(x)]
        torch.baddbmm(norm.unsqueeze(1), x, x.mT, alpha=-2, out=table)
        torch.add(extra.unsqueeze(2), extra.unsqueeze(1), out=other)
        table.add_(norm.unsqueeze(2)).div_(other).diagonal(0, 1, 2).fill_(torch.inf)
        if size % WIDTH == 0:
            lowest[:], which[:] = least(table)
        else:  # costs are symmetric, and the least of a column is found faster than that of a row
            torch.min(table, 1, out=(lowest, which))
    # Costs below 0 are rounding; a slot without partners may have found one that does not exist.
    where = torch.where(blocks.real, blocks.column, rows * width).flatten()
    cost = low.new_full((rows * width + 1,), torch.inf)
    cost = cost.scatter_(0, where, low.clamp_(min=0.0).flatten())[:-1]
    found = partner.new_zeros(rows * width + 1)
    found = found.scatter_(0, where, partner.add_(blocks.first).flatten())[:-1]
    return cost.view(rows, width), found.clamp_(max=width - 1).view(rows, width)
