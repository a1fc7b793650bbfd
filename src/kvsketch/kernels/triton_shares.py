"""The largest share of attention that queries after a context give its tokens, on a GPU.

Scores are never stored: a first kernel sums the weights of every query over all keys, a second one
takes the maximum of every key over all queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.kernels.triton_slots import LN2, LOG2E
from kvsketch.kernels.triton_support import launching, require
from kvsketch.kernels.triton_tuning import fitting, padded, product

# Tiles of queries and of keys; smaller ones for wide heads.
_TILES = (
    {"ROWS": 128, "BLOCK": 64, "num_warps": 8, "num_stages": 3},
    {"ROWS": 64, "BLOCK": 64, "num_warps": 4, "num_stages": 2},
    {"ROWS": 64, "BLOCK": 32, "num_warps": 4, "num_stages": 2},
    {"ROWS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 2},
)


def largest_shares(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Logs of the largest shares, float32 ``[rows, n]``.

    Args:
        queries: float32, float16 or bfloat16 ``[rows, q, head_dim]``, all that read a head's keys.
        keys: ``[rows, n, head_dim]``, in the dtype of the queries.
        scaling: multiplies the scores.

    Raises:
        UnsupportedError: tensors that are not on a CUDA device (outside of Triton's interpreter).
    """
    require(queries)
    queries, keys = queries.contiguous(), keys.contiguous()
    rows, _, dim = queries.shape
    totals, found = (t.new_empty(t.shape[:2], dtype=torch.float32) for t in (queries, keys))
    width = padded(dim)
    tile = fitting(2 * width, queries.element_size(), 0, *_TILES)
    with launching(queries):
        for mine, theirs, out in ((queries, keys, totals), (keys, queries, found)):
            sizes = (mine.shape[1], theirs.shape[1], scaling * LOG2E.value, dim, width)
            grid = (rows * -(-sizes[0] // tile["ROWS"]),)
            _shares[grid](mine, theirs, totals, out, *sizes, out is totals, **tile)
    return found


@triton.jit
def _shares(
    vectors: tl.tensor,
    others: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    count_others: tl.tensor,
    scaling: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOTALS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """If ``TOTALS``, the base-2 logs of the summed weights of a tile of queries over all keys; else
    the natural logs of the largest shares of a tile of keys over all queries."""
    tiles = tl.cdiv(count, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    own = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    mine = _loaded(vectors + row * count * DIM, own, count, DIM, WIDTH)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for start in range(0, count_others, BLOCK):
        other = start + tl.arange(0, BLOCK)
        there = other < count_others
        theirs = _loaded(others + row * count_others * DIM, other, count_others, DIM, WIDTH)
        if TOTALS:
            scores = product(mine, tl.trans(theirs), None, "tf32x3") * scaling
            scores = tl.where(there[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            weight = weight * tl.exp2(highest - higher)
            weight += tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
            highest = higher
        else:
            total = tl.load(totals + row * count_others + other, mask=there, other=float("inf"))
            scores = product(mine, tl.trans(theirs), None, "tf32x3") * scaling - total[None, :]
            highest = tl.maximum(highest, tl.max(scores, axis=1))
    found = highest + tl.log2(weight) if TOTALS else highest * LN2
    tl.store(out + row * count + own, found, mask=own < count)


@triton.jit
def _loaded(
    start: tl.tensor,
    places: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Some of ``count`` contiguous vectors, 0 where there is none."""
    channels = tl.arange(0, WIDTH)
    mask = (places < count)[:, None]
    if WIDTH != DIM:
        mask = mask & (channels < DIM)[None, :]
    at = places.to(tl.int64)[:, None] * DIM + channels[None, :]
    return tl.load(start + at, mask=mask, other=0.0)
