"""Which slots are merged: cheapest partners, and all rounds at once by the compiled kernel."""

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


class _Grouping(ctypes.Structure):
    """``Grouping`` of groups.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("points", "weight", "sizes", "count")),
        *((name, ctypes.c_void_p) for name in ("index", "found")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "dim")),
        ("share", ctypes.c_double),
        ("next", ctypes.c_int64),
    )


def blocks_at_once(blocks: int, size: int, points: Tensor) -> int:
    """How many of ``blocks`` blocks of ``size`` slots ``cheapest`` should be given at a time.

    Args:
        points: any tensor with the dtype and device of the points, ``[..., dim]``.
    """
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


def compiled(weight: Tensor) -> bool:
    """Whether ``grouped`` can group slots with these weights."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and native.library() is not None


def grouped(
    points: Tensor, weight: Tensor, sizes: Tensor, count: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """``methods.closest.group_closest`` by the compiled kernel, one thread for each row.

    Args:
        points: ``[R, n, dim]``, float32, contiguous; undefined afterwards.
        weight: ``[R, n]``, float32, >= 0.
        sizes: the columns that belong to each row, int64 ``[R]``.
        count: groups of each row, int64 ``[R]``.
        share: of a row's slots that a round removes at most.

    Returns:
        The group of each slot, int64 ``[R, n]``, and bool ``[R]``: whether the row has groups.
    """
    library = native.library()
    assert library is not None
    weight, sizes, count = (t.contiguous() for t in (weight, sizes, count))
    index, found = torch.empty_like(weight, dtype=torch.int64), torch.empty_like(sizes)
    addresses = (t.data_ptr() for t in (points, weight, sizes, count, index, found))
    grouping = _Grouping(*addresses, *points.shape, share)
    library.kvsketch_group(ctypes.byref(grouping), native.threads())
    return index, found.bool()
