"""The cheapest partner of every slot, a block of slots at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .points import Points

#: Pairs are looked for within smaller ones: no worse, and less to compute.
_PAIR_BLOCK = 256
# Costs of pairs formed at a time, few enough to stay near the cache.
_BLOCK_COSTS = 1 << 17
#: What ``least`` takes the columns of a table by.
WIDTH = 32


@dataclass(frozen=True)
class Blocks:
    """Every row's slots in blocks of about 256, the last of a row shorter.

    Attributes:
        column: int64 ``[b, s]``: columns of the slots in the table of all rows, ``row * width +
            column``; something else where ``real`` is False.
        real: bool ``[b, s]``.
        first: int64 ``[b]``: the column of a block's first slot within its row.
    """

    column: Tensor
    real: Tensor
    first: Tensor

    @staticmethod
    def of(rows: Tensor, sizes: Tensor, width: int) -> Blocks:
        """Blocks of some rows (int64 ``[r]``) that have ``sizes`` (``[r]``) slots each, of rows of
        ``width`` columns."""
        count = (sizes / _PAIR_BLOCK).round().long().clamp(min=1)
        each = -(-sizes // count)
        most = -(-int(each.max()) // WIDTH) * WIDTH
        row = torch.repeat_interleave(rows, count)
        number = torch.arange(len(row), device=rows.device)
        number -= torch.repeat_interleave(count.cumsum(0) - count, count)
        each, size = (torch.repeat_interleave(t, count) for t in (each, sizes))
        first = number * each
        length = torch.minimum(each, size - first).unsqueeze(1)
        place = torch.arange(most, device=rows.device)
        real = place < length
        column = (row * width + first).unsqueeze(1) + torch.where(real, place, 0)
        return Blocks(column, real, first)


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
    per_weight = 1 / torch.where(live, mine, 1.0).clamp_(min=1e-30)
    places = places.flatten()[blocks.column]
    size = places.shape[1]
    step = max(1, _BLOCK_COSTS // size**2, len(places) // 128)
    dead, low, partner = ~live, torch.empty_like(mine), torch.empty_like(places)
    for start in range(0, len(places), step):
        part = slice(start, start + step)
        x = points.at(places[part])
        norm = torch.linalg.vector_norm(x, dim=-1).square_().masked_fill_(dead[part], torch.inf)
        extra = per_weight[part]
        cost = torch.baddbmm(norm.unsqueeze(1), x, x.mT, alpha=-2)
        cost += norm.unsqueeze(2)
        cost /= extra.unsqueeze(2) + extra.unsqueeze(1)
        cost.diagonal(0, 1, 2).fill_(torch.inf)
        low[part], partner[part] = least(cost)
    # Costs below 0 are rounding; a slot without partners may have found one that does not exist.
    where = torch.where(blocks.real, blocks.column, rows * width).flatten()
    cost = low.new_full((rows * width + 1,), torch.inf)
    cost = cost.scatter_(0, where, low.clamp_(min=0.0).flatten())[:-1].view(rows, width)
    found = partner.add_(blocks.first.unsqueeze(1)).clamp_(max=width - 1).flatten()
    partner = partner.new_zeros(rows * width + 1).scatter_(0, where, found)[:-1]
    return cost, partner.view(rows, width)


def least(table: Tensor) -> tuple[Tensor, Tensor]:
    """The least of every row of ``[R, n, m]``, m a multiple of ``WIDTH``, and its column: in two
    levels, since torch's argmin takes ten times as long as its amin."""
    # Column j is (j // WIDTH, j % WIDTH): the least over the former, then over the latter.
    folded = table.view(*table.shape[:2], -1, WIDTH)
    low, column = folded.amin(2).min(-1)
    at = column[..., None, None].expand(-1, -1, folded.shape[2], 1)
    return low, folded.gather(3, at).squeeze(3).argmin(-1) * WIDTH + column
