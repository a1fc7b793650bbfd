"""The cheapest partner of every slot, computed block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.kernels import pairs
from kvsketch.methods.points import Points

#: Slots per block. Pairs are searched only within blocks, which is no worse and costs less.
_PAIR_BLOCK = 256
# The sizes of blocks are multiples of this number, for which matrix products are faster.
_WIDTH = 8


@dataclass(frozen=True)
class SlotBlocks:
    """The slots of every row in blocks of about 256. The last block of a row may be shorter.

    Attributes:
        column: int64 ``[b, s]``, the columns of the slots in the table of all rows, ``row * width +
            column``, or that of the block's first slot where ``real`` is False.
        real: bool ``[b, s]``, whether there is a slot.
        first: int64 ``[b, 1]``, the column of a block's first slot within its row.
        row: int64 ``[b]``, the row of a block.
    """

    column: Tensor
    real: Tensor
    first: Tensor
    row: Tensor

    @staticmethod
    def of(rows: Tensor, sizes: Tensor, width: int) -> SlotBlocks:
        """The blocks of some rows (int64 ``[r]``) with ``sizes`` (``[r]``) slots, out of rows of
        ``width`` columns."""
        count = (sizes / _PAIR_BLOCK).round().long().clamp(min=1)
        each = -(-sizes // count)
        count = -(-sizes // each)  # rounded up, so that the last block may be shorter
        most = -(-int(each.max()) // _WIDTH) * _WIDTH
        number = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
        row, each, size = rows[number], each[number], sizes[number]
        before = (count.cumsum(0) - count)[number]
        first = (torch.arange(len(row), device=rows.device) - before) * each
        place = torch.arange(most, device=rows.device)
        real = place < torch.minimum(each, size - first).unsqueeze(1)
        column = (row * width + first).unsqueeze(1) + place * real
        return SlotBlocks(column, real, first.unsqueeze(1), row)


def cheapest(
    points: Points, places: Tensor, weight: Tensor, blocks: SlotBlocks
) -> tuple[Tensor, Tensor]:
    """The cost of merging each slot with its cheapest partner in its block: m1 m2 / (m1 + m2)
    |x1 - x2|^2 for weights m (Ward 1963).

    Args:
        points: the points of the slots.
        places: the place of each slot's point, int64 ``[R, width]``.
        weight: ``[R, width]``, >= 0.
        blocks: the blocks of the columns.

    Returns:
        Costs ``[R, width]``, and the column of each slot's partner, int64 ``[R, width]``. The cost
        is infinite for a slot of weight 0, for a slot without others in its block, and outside all
        blocks.
    """
    rows, width = weight.shape
    mine = weight.flatten()[blocks.column] * blocks.real
    live = mine > 0
    per_weight = torch.where(live, mine, 1.0).clamp_(min=1e-30).reciprocal_()
    absent = torch.zeros_like(mine).masked_fill_(~live, torch.inf)
    low, partner = torch.empty_like(mine), torch.empty_like(blocks.column)
    count, size = mine.shape
    step = pairs.blocks_at_once(count, size, weight)
    some = points.blocks(blocks.row, places.flatten()[blocks.column], step)
    parts = (torch.split(x, step) for x in (per_weight, absent, low, partner))
    for x, extra, added, lowest, which in zip(some, *parts, strict=True):
        lowest[:], which[:] = pairs.cheapest(x, extra, added)
    # Costs below 0 come from rounding. A slot without partners may have one that does not exist.
    where = torch.where(blocks.real, blocks.column, rows * width).flatten()
    cost = low.new_full((rows * width + 1,), torch.inf)
    cost = cost.scatter_(0, where, low.clamp_(min=0.0).flatten())[:-1]
    found = partner.new_zeros(rows * width + 1)
    found = found.scatter_(0, where, partner.add_(blocks.first).flatten())[:-1]
    return cost.view(rows, width), found.clamp_(max=width - 1).view(rows, width)
