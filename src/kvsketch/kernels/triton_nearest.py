"""The nearest centre of every key, and the sum of the keys of every centre: one step of Lloyd's
algorithm.

One pass over the keys keeps a running minimum over tiles of centres, so that the n x c distances
are never in memory. The keys are then sorted by centre, and one program per centre adds up its keys
in their order, so that the same call always gives the same bits. Atomic additions would not.

No speed has been measured on a GPU yet, nor have these sums been compared with atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InputError, UnsupportedError
from .flat_page import check_block, check_column, check_dtype, check_together
from .triton_support import launching, require
from .triton_tuning import padded, product, tuned

# Keys of a centre that are read at a time. Most centres have few.
_MEMBERS = 16


def nearest(
    keys: Tensor,
    centres: Tensor,
    weight: Tensor | None = None,
    *,
    rows: int | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign keys to their nearest centres, and add up the keys of every centre.

    Distances are ``|c|^2 - 2 <k, c>`` in float32. A mean far from 0 costs digits, so that it should
    be subtracted before. Of equally near centres the first is chosen. Keys and centres must be
    finite.

    Args:
        keys: float32, float16 or bfloat16 ``[R, n, d]``.
        centres: in the same dtype ``[R, c, d]``, c >= 1.
        weight: of the keys in sums and counts, float32 ``[R, n]``. None: all 1.
        rows: keys per tile, a power of two >= 16. None: tuned on a GPU.
        block: centres per tile, a power of two >= 16. None: tuned on a GPU.

    Returns:
        index, int64 ``[R, n]``; sums of ``weight * key``, float32 ``[R, c, d]``; sums of the
        weights, float32 ``[R, c]``. A centre without keys has sums of 0.

    Raises:
        InputError: shapes, dtypes or devices do not fit together, or there is no centre.
        UnsupportedError: float64, gradients, d above 1,024, 2^30 or more keys or centres, tensors
            that are not on a CUDA device (outside of Triton's interpreter).
    """
    _check(keys, centres, weight)
    check_block("rows", rows)
    check_block("block", block)
    require(keys)
    repeats, n, dim = keys.shape
    count = centres.shape[1]
    index = torch.empty(repeats, n, dtype=torch.int32, device=keys.device)
    sums = torch.empty(repeats, count, dim, dtype=torch.float32, device=keys.device)
    counts = torch.empty(repeats, count, dtype=torch.float32, device=keys.device)
    width = padded(dim)
    if index.numel():
        kernel, arguments = _assign_tuned, {}
        if rows is not None or block is not None or kernel is _assign:
            kernel, arguments = _assign, {"ROWS": rows or 64, "BLOCK": block or 64}

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (repeats * -(-n // int(meta["ROWS"])),)

        with launching(keys):
            kernel[grid](
                keys,
                keys.stride(),
                centres,
                centres.stride(),
                index,
                n,
                count,
                DIM=dim,
                WIDTH=width,
                enable_fp_fusion=True,
                **arguments,
            )
    # Sort the keys by centre. The keys of a centre keep their order.
    ordered, members = index.sort(dim=1, stable=True)
    edges = torch.arange(count + 1, dtype=torch.int32, device=keys.device).expand(repeats, -1)
    first = torch.searchsorted(ordered, edges.contiguous())
    if counts.numel():
        with launching(keys):
            _sum[(repeats * count,)](
                keys,
                keys.stride(),
                weight,
                (0, 0) if weight is None else weight.stride(),
                members,
                first,
                sums,
                counts,
                n,
                count,
                DIM=dim,
                WIDTH=width,
                MEMBERS=_MEMBERS,
                enable_fp_fusion=True,
            )
    return index.long(), sums, counts


@triton.jit
def _assign(
    keys: tl.tensor,
    keys_at: tl.tuple,
    centres: tl.tensor,
    centres_at: tl.tuple,
    index: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the nearest centre of every key of a tile."""
    tiles = tl.cdiv(n, ROWS)
    repeat = (tl.program_id(0) // tiles).to(tl.int64)
    key = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    at = keys + repeat * keys_at[0] + key[:, None] * keys_at[1]
    k = tl.load(
        at + channel[None, :] * keys_at[2],
        mask=(key < n)[:, None] & (channel < DIM)[None, :],
        other=0.0,
    )
    least = tl.full([ROWS], float("inf"), tl.float32)
    best = tl.zeros([ROWS], tl.int32)
    for start in range(0, count, BLOCK):
        number = start + tl.arange(0, BLOCK)
        places = centres + repeat * centres_at[0] + number.to(tl.int64)[:, None] * centres_at[1]
        c = tl.load(
            places + channel[None, :] * centres_at[2],
            mask=(number < count)[:, None] & (channel < DIM)[None, :],
            other=0.0,
        )
        wide = c.to(tl.float32)
        norm = tl.where(number < count, tl.sum(wide * wide, axis=1), float("inf"))
        distance = norm[None, :] - 2 * product(k, tl.trans(c), None, "ieee")
        low, column = tl.min(
            distance, axis=1, return_indices=True, return_indices_tie_break_left=True
        )
        nearer = low < least
        least = tl.where(nearer, low, least)
        best = tl.where(nearer, start + column, best)
    tl.store(index + repeat * n + key, best, mask=key < n)


@triton.jit
def _sum(
    keys: tl.tensor,
    keys_at: tl.tuple,
    weight: tl.tensor,
    weight_at: tl.tuple,
    members: tl.tensor,
    first: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:
    """Add up the keys of one centre."""
    repeat = (tl.program_id(0) // count).to(tl.int64)
    centre = (tl.program_id(0) % count).to(tl.int64)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    begin = tl.load(first + repeat * (count + 1) + centre)
    end = tl.load(first + repeat * (count + 1) + centre + 1)
    summed = tl.zeros([WIDTH], tl.float32)
    counted = tl.zeros([MEMBERS], tl.float32)
    for start in range(begin, end, MEMBERS):
        place = start + tl.arange(0, MEMBERS)
        there = place < end
        key = tl.load(members + repeat * n + place, mask=there, other=0)
        k = tl.load(
            keys + repeat * keys_at[0] + key[:, None] * keys_at[1] + channel[None, :] * keys_at[2],
            mask=there[:, None] & (channel < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        if weight is not None:
            share = tl.load(
                weight + repeat * weight_at[0] + key * weight_at[1], mask=there, other=0.0
            )
            k *= share[:, None]
        else:
            share = there.to(tl.float32)
        summed += tl.sum(k, axis=0)
        counted += share
    tl.store(sums + (repeat * count + centre) * DIM + channel, summed, mask=channel < DIM)
    tl.store(counts + repeat * count + centre, tl.sum(counted, axis=0))


_assign_tuned = tuned(
    _assign,
    ["WIDTH"],
    {"ROWS": 16, "BLOCK": 16, "warps": 4, "stages": 2},
    {"ROWS": 64, "BLOCK": 32, "warps": 4, "stages": 2},
    {"ROWS": 64, "BLOCK": 64, "warps": 4, "stages": 3},
    {"ROWS": 128, "BLOCK": 32, "warps": 8, "stages": 2},
    {"ROWS": 128, "BLOCK": 64, "warps": 8, "stages": 3},
)


def _check(keys: Tensor, centres: Tensor, weight: Tensor | None) -> None:
    for name, given in (("keys", keys), ("centres", centres)):
        if given.dim() != 3:
            raise InputError(f"{name} must have three axes, got {tuple(given.shape)}")
        check_dtype(name, given)
    repeats, n, dim = keys.shape
    if centres.shape[0] != repeats or centres.shape[2] != dim or centres.dtype != keys.dtype:
        raise InputError(
            f"centres {centres.dtype} {tuple(centres.shape)} must have the dtype, R and d of keys "
            f"{keys.dtype} {tuple(keys.shape)}"
        )
    if centres.shape[1] == 0 or dim == 0:
        raise InputError(f"centres {tuple(centres.shape)} must be at least one, of d >= 1")
    check_column("weight", weight, (repeats, n), (torch.float32,))
    check_together(keys, centres, weight)
    if dim > 1024 or max(repeats * n, repeats * centres.shape[1]) > 2**30:
        raise UnsupportedError(
            f"keys {tuple(keys.shape)}, centres {tuple(centres.shape)}: the kernel takes d <= 1024 "
            "and at most 2^30 keys and centres"
        )
