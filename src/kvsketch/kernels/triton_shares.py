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
    (rows, q, dim), n = queries.shape, keys.shape[1]
    totals = torch.empty(rows, q, dtype=torch.float32, device=queries.device)
    found = torch.empty(rows, n, dtype=torch.float32, device=queries.device)
    width = padded(dim)
    tile = fitting(2 * width, queries.element_size(), 0, *_TILES)
    with launching(queries):
        for kernel, out, own in ((_totals, totals, q), (_largest, found, n)):
            kernel[(rows * -(-own // tile["ROWS"]),)](
                queries, keys, totals, out, q, n, scaling * LOG2E.value, dim, width, **tile
            )
    return found


@triton.jit
def _totals(
    queries: tl.tensor,
    keys: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    n: tl.tensor,
    scaling: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The base-2 logs of the summed weights of a tile of queries."""
    tiles = tl.cdiv(q, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    own = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    mine = _loaded(queries + row * q * DIM, own, q, DIM, WIDTH)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = _loaded(keys + row * n * DIM, other, n, DIM, WIDTH)
        scores = product(mine, tl.trans(theirs), None, "tf32x3") * scaling
        scores = tl.where((other < n)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weight = weight * tl.exp2(highest - higher)
        weight += tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
        highest = higher
    tl.store(totals + row * q + own, highest + tl.log2(weight), mask=own < q)


@triton.jit
def _largest(
    queries: tl.tensor,
    keys: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    q: tl.tensor,
    n: tl.tensor,
    scaling: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The natural logs of the largest shares of a tile of keys."""
    tiles = tl.cdiv(n, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    own = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    mine = _loaded(keys + row * n * DIM, own, n, DIM, WIDTH)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, q, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = _loaded(queries + row * q * DIM, other, q, DIM, WIDTH)
        total = tl.load(totals + row * q + other, mask=other < q, other=float("inf"))
        scores = product(mine, tl.trans(theirs), None, "tf32x3") * scaling - total[None, :]
        highest = tl.maximum(highest, tl.max(scores, axis=1))
    tl.store(out + row * n + own, highest * LN2, mask=own < n)


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
