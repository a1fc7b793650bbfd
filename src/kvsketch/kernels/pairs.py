"""The cheapest partner of every slot among the slots of its block."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.pieces import at_once

#: What ``least`` takes the columns of a table by.
WIDTH = 32
# Costs that are computed at a time by torch, few enough to stay in the processor's cache.
_COSTS = 1 << 18
# Points of blocks at a time for the compiled kernel: 4 MB in float32.
_POINTS = 1 << 20


def blocks_at_once(blocks: int, size: int, dim: int, points: Tensor) -> int:
    """How many of ``blocks`` blocks of ``size`` slots ``cheapest`` should be given at a time.

    Args:
        points: any tensor with the dtype and device of the points, ``[..., dim]``.
    """
    if _compiled(points):
        return max(1, _POINTS // (size * dim))
    return max(1, at_once(points, _COSTS) // size**2, blocks // 128)


def cheapest(points: Tensor, per_weight: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """The least of (|x - y|^2) / (1/m + 1/n), over the other slots of the block.

    Args:
        points: ``[blocks, size, dim]``, float32 or float64.
        per_weight: 1/m, ``[blocks, size]``.
        absent: 0, or infinity for a slot that is not there, ``[blocks, size]``.

    Returns:
        The costs ``[blocks, size]``, infinite for a slot without partners, and below 0 by rounding;
        and the partners' columns within the block, int64 ``[blocks, size]``.
    """
    if _compiled(points):
        return _by_compiled(points, per_weight, absent)
    norm = torch.linalg.vector_norm(points, dim=-1)
    norm = torch.addcmul(absent, norm, norm)
    table = torch.baddbmm(norm.unsqueeze(1), points, points.mT, alpha=-2)
    other = per_weight.unsqueeze(2) + per_weight.unsqueeze(1)
    table.add_(norm.unsqueeze(2)).div_(other).diagonal(0, 1, 2).fill_(torch.inf)
    if points.shape[1] % WIDTH == 0:
        return least(table)
    low, partner = table.min(1)  # costs are symmetric, and columns are faster than rows
    return low, partner


def least(table: Tensor) -> tuple[Tensor, Tensor]:
    """The least of every row of ``[R, n, m]``, m a multiple of ``WIDTH``, and its column: in two
    levels, since torch's argmin takes ten times as long as its amin."""
    # Column j is (j // WIDTH, j % WIDTH): the least over the former, then over the latter.
    folded = table.view(*table.shape[:2], -1, WIDTH)
    low, column = folded.amin(2).min(-1)
    at = column[..., None, None].expand(-1, -1, folded.shape[2], 1)
    return low, folded.gather(3, at).squeeze(3).argmin(-1) * WIDTH + column


def _compiled(points: Tensor) -> bool:
    on_cpu = points.device.type == "cpu" and points.dtype == torch.float32
    return on_cpu and native.library() is not None


def _by_compiled(points: Tensor, per_weight: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    given = [t.contiguous() for t in (points, per_weight, absent)]
    low = torch.empty_like(given[1])
    partner = torch.empty(low.shape, dtype=torch.int64)
    # ``Pairs`` of pairs.h; the last number is its counter.
    pairs = (ctypes.c_int64 * 9)(*(t.data_ptr() for t in (*given, low, partner)), *points.shape, 0)
    library.kvsketch_pair(pairs, torch.get_num_threads())
    return low, partner
