"""Attention of new queries over the ragged heads of a flat page and over the new tokens.

This is the attention of a prompt that is read in chunks: query i of q attends to every slot of its
head and to the new tokens up to its own. One pass over both uses a streaming softmax
(FlashAttention, Dao et al. 2022, 2205.14135), so that no scores are kept in memory. The queries of
all heads of a group are rows of the same tile and share its read of the slots.

A few queries over many slots leave most
of a GPU idle, since slots are not split here, unlike in ``triton_decode``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.kernels.flat_page import (
    Page,
    check,
    check_block,
    check_column,
    check_new,
    check_together,
    given,
)
from kvsketch.kernels.triton_arguments import KernelScores, New, at, flat, width_of
from kvsketch.kernels.triton_slots import (
    LOG2E,
    against,
    attend_slots,
    columns,
    finished,
    log2_of,
    owned,
    place,
    scored,
    weigh,
)
from kvsketch.kernels.triton_support import launching, require
from kvsketch.kernels.triton_tuning import fitting, product

# Tiles for many queries and for a few; smaller ones for wide heads.
_MANY = (
    {"ROWS": 64, "BLOCK": 64, "num_warps": 4, "num_stages": 3},
    {"ROWS": 64, "BLOCK": 32, "num_warps": 4, "num_stages": 2},
    {"ROWS": 16, "BLOCK": 32, "num_warps": 4, "num_stages": 2},
    {"ROWS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 2},
)
_FEW = (
    {"ROWS": 16, "BLOCK": 64, "num_warps": 4, "num_stages": 3},
    *_MANY[2:],
)


def prefill(
    queries: Tensor,
    keys: Page,
    values: Page,
    log_mass: Tensor | None,
    start: Tensor,
    count: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
    new_log_mass: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    new_positions: Tensor | None = None,
    pages: Tensor | None = None,
    rows: int | None = None,
    block: int | None = None,
    precision: str = "tf32x3",
    out: Tensor | None = None,
    log_total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``estimator.attend`` of q queries per head over a flat page and, causally, over q new tokens.

    Args:
        queries: float32, float16 or bfloat16 ``[batch, num_attention_heads, q, head_dim]``.
        keys, values, log_mass, start, count, scaling, softcap, sinks, slopes, positions, pages:
            as for ``triton_decode.decode``.
        new_keys: ``[batch, num_key_value_heads, q, head_dim]``, of the queries' own tokens.
        new_values: ``[batch, num_key_value_heads, q, value_dim]``.
        new_log_mass: float32 ``[batch, num_key_value_heads, q]``, ``NOTHING`` or -inf for
            padding, to which no query attends. None: all 0.
        new_positions: of the new tokens and queries, in the dtype of ``positions`` ``[batch, q]``.
            Needed for slopes, as ``positions`` are.
        rows: (query, head of the group) pairs per tile, a power of two >= 16. None:
            chosen by the size of the heads.
        block: slots or new tokens per tile, a power of two >= 16. None: likewise.
        precision: of products of float32 numbers on a GPU: "tf32x3" (three products of the tensor
            cores for each) or "ieee" (without tensor cores).
        out, log_total: tensors into which the results are written.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries, and the
        logarithm of the denominator, float32 ``[batch, num_attention_heads, q]``. For a query
        without any mass to attend to they are 0, and -inf or its sink.

    Raises:
        InputError: shapes, dtypes or devices do not fit together, or a number is out of range.
        UnsupportedError: float64, gradients, head_dim or value_dim above 1,024, 2^30 or more slots,
            queries times heads of a group, or tiles, tensors that are not on a CUDA device (outside
            of Triton's interpreter).
    """
    sizes = check(
        queries,
        keys,
        values,
        log_mass,
        start,
        count,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
        positions=positions,
        pages=pages,
    )
    require(queries)
    check_new(sizes, queries, new_keys, new_values, new_log_mass)
    if slopes is not None:
        assert positions is not None
        if new_positions is None:
            raise InputError("slopes (ALiBi) need new_positions")
        shape = (sizes.batch, sizes.queries)
        check_column("new_positions", new_positions, shape, (positions.dtype,))
        check_together(queries, new_positions)
    if precision not in ("ieee", "tf32x3"):
        raise InputError(f"precision={precision!r} must be 'ieee' or 'tf32x3'")
    check_block("rows", rows)
    check_block("block", block)
    shape3 = (sizes.batch, sizes.heads, sizes.queries)
    out = given("out", out, queries, (*shape3, sizes.value_dim), queries.dtype)
    log_total = given("log_total", log_total, queries, shape3, torch.float32)
    if out.numel() == 0:
        return out, log_total
    pairs, both = sizes.queries * sizes.group, sizes.batch * sizes.kv_heads
    if max(pairs, both * -(-pairs // 16)) > 2**30:
        raise UnsupportedError(f"{pairs} queries x heads of a group, {both} rows x KV heads")

    page = flat(keys, values, log_mass, positions, start, count, pages)
    # A row of a tile is a query times a group of channels that has its own scale.
    each = max(page.key.tiles.value, page.value.tiles.value)
    width, size = width_of(page.key) + width_of(page.value), queries.element_size()
    usual = _MANY if pairs * each > 16 else _FEW
    tile = dict(fitting(width, size, 16, *usual))
    tile.update({k: v for k, v in (("ROWS", rows), ("BLOCK", block)) if v is not None})
    grid = (both * -(-pairs // max(16, tile["ROWS"] // each)),)

    given_new = (new_log_mass, at(new_log_mass), new_positions, at(new_positions))
    with launching(queries):
        _attend_rows[grid](
            queries,
            at(queries),
            page,
            New(new_keys, at(new_keys), new_values, at(new_values), *given_new),
            KernelScores(float(scaling), softcap, sinks, at(sinks), slopes, at(slopes)),
            out,
            at(out),
            log_total,
            at(log_total),
            sizes.kv_heads,
            sizes.group,
            sizes.queries,
            HEAD_BLOCK=width_of(page.key),
            VALUE_BLOCK=width_of(page.value),
            PRECISION=precision,
            enable_fp_fusion=True,
            **tile,
        )
    return out, log_total


@triton.jit
def _attend_rows(
    queries: tl.tensor,
    queries_at: tl.tuple,
    page: tl.tuple,
    new: tl.tuple,
    scoring: tl.tuple,
    out: tl.tensor,
    out_at: tl.tuple,
    log_total: tl.tensor,
    log_total_at: tl.tuple,
    kv_heads: tl.tensor,
    group: tl.tensor,
    number_new: tl.tensor,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attend for a tile of rows of a KV head. Row r is query ``r // group`` of query head
    ``r % group``."""
    PAIRS: tl.constexpr = max(16, ROWS // max(page.key.tiles, page.value.tiles))
    pairs = number_new * group
    tiles = tl.cdiv(pairs, PAIRS)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # the last tiles take longest, so they start first
    program = program // tiles
    row, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    head_channels = columns(page.key, HEAD_BLOCK)
    value_channels = columns(page.value, VALUE_BLOCK)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < pairs
    token = (pair // group).to(tl.int64)
    heads = head * group + pair % group
    first, number, wrong = owned(page, row, head)
    at = queries + row * queries_at[0] + heads * queries_at[1] + token * queries_at[2]
    q = tl.load(
        at[:, None] + head_channels[None, :] * queries_at[3],
        mask=is_pair[:, None] & (head_channels < page.key.dim)[None, :],
        other=0.0,
    )
    highest = tl.full([PAIRS], float("-inf"), tl.float32)
    weight = tl.zeros([PAIRS], tl.float32)
    if scoring.sinks is not None:
        sink = tl.load(scoring.sinks + heads * scoring.sinks_at[0], mask=is_pair, other=0.0)
        highest = sink.to(tl.float32) * LOG2E
        weight = tl.where(highest != float("-inf"), 1.0, weight)
    slope = None
    here = None
    if scoring.slopes is not None:
        slope = tl.load(scoring.slopes + heads * scoring.slopes_at[0], mask=is_pair, other=0.0)
        slope = slope.to(tl.float32)
        places = new.positions + row * new.positions_at[0] + token * new.positions_at[1]
        here = tl.load(places, mask=is_pair, other=0)
    highest, weight, summed = attend_slots(
        highest,
        weight,
        q,
        page,
        scoring,
        slope,
        here,
        place(page, row),
        head,
        first,
        0,
        number,
        VALUE_BLOCK,
        BLOCK,
        PRECISION,
    )
    # Every row of the tile attends to the new tokens up to that of the first row. The causal mask
    # is needed only for those after it.
    seen_by_all = (tile * PAIRS // group + 1) // BLOCK * BLOCK
    seen = tl.minimum((tile * PAIRS + PAIRS - 1) // group + 1, number_new)
    for part in tl.static_range(2):
        highest, weight, summed = _attend_new(
            highest,
            weight,
            summed,
            q,
            new,
            scoring,
            slope,
            here,
            row,
            head,
            token,
            0 if part == 0 else seen_by_all,
            seen_by_all if part == 0 else seen,
            page.key,
            page.value,
            BLOCK,
            PRECISION,
            part == 1,
        )
    mean, log = finished(highest, weight, summed, wrong)
    outs = out + row * out_at[0] + heads * out_at[1] + token * out_at[2]
    tl.store(
        outs[:, None] + value_channels[None, :] * out_at[3],
        mean.to(out.dtype.element_ty),
        mask=is_pair[:, None] & (value_channels < page.value.dim)[None, :],
    )
    totals = log_total + row * log_total_at[0] + heads * log_total_at[1]
    tl.store(totals + token * log_total_at[2], log, mask=is_pair)


@triton.jit
def _attend_new(
    highest: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    q: tl.tensor,
    new: tl.tuple,
    scoring: tl.tuple,
    slope: tl.tensor,
    here: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key: tl.tuple,
    value: tl.tuple,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tl.tuple:
    """The streaming softmax over the new tokens ``begin .. end - 1`` of a head."""
    head_channels = columns(key, q.shape[1])
    value_channels = columns(value, summed.shape[1])
    keys = new.key + row * new.key_at[0] + head * new.key_at[1]
    values = new.value + row * new.value_at[0] + head * new.value_at[1]
    for offset in range(begin, end, BLOCK):
        tokens = (offset + tl.arange(0, BLOCK)).to(tl.int64)
        there = tokens < end
        k = tl.load(
            keys + tokens[:, None] * new.key_at[2] + head_channels[None, :] * new.key_at[3],
            mask=there[:, None] & (head_channels < key.dim)[None, :],
            other=0.0,
        )
        distance = None
        if slope is not None:
            places = new.positions + row * new.positions_at[0] + tokens * new.positions_at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = against(q, k, PRECISION)
        scores = scored(scores, None, slope, distance, scoring)
        if new.mass is not None:
            masses = new.mass + row * new.mass_at[0] + head * new.mass_at[1]
            scores += log2_of(masses + tokens * new.mass_at[2], there)[None, :]
        if CAUSAL:
            scores = tl.where(tokens[None, :] <= token[:, None], scores, float("-inf"))
        v = tl.load(
            values + tokens[:, None] * new.value_at[2] + value_channels[None, :] * new.value_at[3],
            mask=there[:, None] & (value_channels < value.dim)[None, :],
            other=0.0,
        )
        highest, weight, keep, share = weigh(highest, weight, scores)
        summed = product(share.to(v.dtype), v, summed * keep[:, None], PRECISION)
    return highest, weight, summed
