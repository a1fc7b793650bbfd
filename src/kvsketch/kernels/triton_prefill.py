"""Attention of new queries over the ragged heads of a flat page and over their own new tokens.

What a prompt pays when it streams in chunks: query i of q sees every slot of its head and, of the
new tokens, those up to its own. One pass over both with a streaming softmax (FlashAttention, Dao
et al. 2022, 2205.14135); the queries of all heads of a group are the rows of a tile, so that they
share the read. No scores in memory.

Still to be measured on a GPU: everything; tile sizes are tuned there on the first call of a shape.
A few queries over many slots leave most of a GPU idle, since slots are not split here as
``triton_decode`` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InputError, UnsupportedError
from .flat_page import (
    Page,
    Sizes,
    check,
    check_block,
    check_column,
    check_dtype,
    check_together,
    given,
)
from .triton_support import interpreted, require
from .triton_tiles import (
    LOG2E,
    absorb,
    attend_slots,
    constants,
    finished,
    owned,
    padded,
    pointers,
    score,
    strides,
    tuned,
)


def prefill(
    queries: Tensor,
    keys: Page,
    values: Page,
    mass: Tensor | None,
    start: Tensor,
    count: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
    new_mass: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    new_positions: Tensor | None = None,
    rows: int | None = None,
    block: int | None = None,
    precision: str = "tf32x3",
    out: Tensor | None = None,
    log_total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``slots.attend`` of q queries per head over a flat page and causally over q new tokens.

    Args:
        queries: float32, float16 or bfloat16 ``[batch, num_attention_heads, q, head_dim]``.
        keys, values, mass, start, count, scaling, softcap, sinks, slopes, positions: as for
            ``triton_decode.decode``.
        new_keys: ``[batch, num_key_value_heads, q, head_dim]``, of the tokens of the queries.
        new_values: ``[batch, num_key_value_heads, q, value_dim]``.
        new_mass: float32 ``[batch, num_key_value_heads, q]``; 0 for padding, which no query sees.
            None: all 1.
        new_positions: of the new tokens and queries, in the dtype of ``positions`` ``[batch, q]``;
            needed for slopes, as ``positions`` are.
        rows: (query, head of the group) pairs per tile, a power of two >= 16; block: slots or new
            tokens per tile, likewise. None: tuned on a GPU.
        precision: of products of float32 numbers on a GPU: "tf32x3", each made of three products
            of the tensor cores, or "ieee", without them.
        out, log_total: what is returned, to be written in place.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries, and the
        logarithm of what was divided by, float32 ``[batch, num_attention_heads, q]``. A query that
        sees no mass gets 0, and -inf or its sink.

    Raises:
        InputError: shapes, dtypes or devices do not fit together; a number out of range.
        UnsupportedError: float64, gradients, head_dim or value_dim above 1,024, 2^30 slots,
            queries times heads of a group or tiles and more, tensors that are not on a CUDA device
            (outside of Triton's interpreter).
    """
    sizes = check(
        queries,
        keys,
        values,
        mass,
        start,
        count,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
        positions=positions,
    )
    require(queries)
    _check_new(sizes, queries, new_keys, new_values, new_mass)
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
    arguments: dict[str, Any] = constants("KEYS", keys) | constants("VALUES", values)
    kernel = _attend_tuned
    if rows is not None or block is not None or interpreted():
        kernel = _attend_rows
        arguments |= {"ROWS": rows or 64, "BLOCK": block or 64}
    pairs, both = sizes.queries * sizes.group, sizes.batch * sizes.kv_heads
    if max(pairs, both * -(-pairs // 16)) > 2**30:
        raise UnsupportedError(f"{pairs} queries x heads of a group, {both} rows x KV heads")

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (both * -(-pairs // int(meta["ROWS"])),)

    kernel[grid](
        queries,
        queries.stride(),
        pointers(keys),
        strides(keys),
        pointers(values),
        strides(values),
        mass,
        (0, 0) if mass is None else mass.stride(),
        start,
        start.stride(),
        count,
        count.stride(),
        new_keys,
        new_keys.stride(),
        new_values,
        new_values.stride(),
        new_mass,
        (0, 0, 0) if new_mass is None else new_mass.stride(),
        sinks,
        0 if sinks is None else sinks.stride(0),
        slopes,
        0 if slopes is None else slopes.stride(0),
        positions,
        (0, 0) if positions is None else positions.stride(),
        new_positions,
        (0, 0) if new_positions is None else new_positions.stride(),
        out,
        out.stride(),
        log_total,
        log_total.stride(),
        sizes.kv_heads,
        sizes.group,
        sizes.queries,
        sizes.total,
        float(scaling),
        None if softcap is None else float(softcap),
        HEAD_DIM=sizes.head_dim,
        VALUE_DIM=sizes.value_dim,
        HEAD_BLOCK=padded(sizes.head_dim),
        VALUE_BLOCK=padded(sizes.value_dim),
        MOST_ROWS=min(padded(pairs), 128),
        PRECISION=precision,
        **arguments,
    )
    return out, log_total


@triton.jit
def _attend_rows(
    queries: tl.tensor,
    queries_at: tl.tuple,
    keys: tl.tuple,
    keys_at: tl.tuple,
    values: tl.tuple,
    values_at: tl.tuple,
    mass: tl.tensor,
    mass_at: tl.tuple,
    start: tl.tensor,
    start_at: tl.tuple,
    count: tl.tensor,
    count_at: tl.tuple,
    new_keys: tl.tensor,
    new_keys_at: tl.tuple,
    new_values: tl.tensor,
    new_values_at: tl.tuple,
    new_mass: tl.tensor,
    new_mass_at: tl.tuple,
    sinks: tl.tensor,
    sinks_at: tl.tensor,
    slopes: tl.tensor,
    slopes_at: tl.tensor,
    positions: tl.tensor,
    positions_at: tl.tuple,
    new_positions: tl.tensor,
    new_positions_at: tl.tuple,
    out: tl.tensor,
    out_at: tl.tuple,
    log_total: tl.tensor,
    log_total_at: tl.tuple,
    kv_heads: tl.tensor,
    group: tl.tensor,
    number_new: tl.tensor,
    total: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    KEYS_BITS: tl.constexpr,
    KEYS_WIDTH: tl.constexpr,
    KEYS_BYTES: tl.constexpr,
    KEYS_GROUPS: tl.constexpr,
    VALUES_BITS: tl.constexpr,
    VALUES_WIDTH: tl.constexpr,
    VALUES_BYTES: tl.constexpr,
    VALUES_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    MOST_ROWS: tl.constexpr,  # of a tile that is not too large: only there to be tuned for
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of rows of a KV head; row r is query ``r // group`` of head ``r % group``."""
    pairs = number_new * group
    tiles = tl.cdiv(pairs, ROWS)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # the last tiles see most: they start first
    batch_row, head = (program // tiles // kv_heads).to(tl.int64), program // tiles % kv_heads
    head_channels = tl.arange(0, HEAD_BLOCK).to(tl.int64)
    value_channels = tl.arange(0, VALUE_BLOCK).to(tl.int64)
    pair = tile * ROWS + tl.arange(0, ROWS)
    is_pair = pair < pairs
    token = (pair // group).to(tl.int64)
    heads = (head * group + pair % group).to(tl.int64)
    head = head.to(tl.int64)

    first, number, wrong = owned(start, start_at, count, count_at, batch_row, head, total)
    at = queries + batch_row * queries_at[0] + heads * queries_at[1] + token * queries_at[2]
    q = tl.load(
        at[:, None] + head_channels[None, :] * queries_at[3],
        mask=is_pair[:, None] & (head_channels < HEAD_DIM)[None, :],
        other=0.0,
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + heads * sinks_at, mask=is_pair, other=0.0).to(tl.float32) * LOG2E
        weight += 1.0
    slope = None
    here = None
    if slopes is not None:
        slope = tl.load(slopes + heads * slopes_at, mask=is_pair, other=0.0).to(tl.float32)
        places = new_positions + batch_row * new_positions_at[0] + token * new_positions_at[1]
        here = tl.load(places, mask=is_pair, other=0)
    highest, weight, summed = attend_slots(
        highest,
        weight,
        summed,
        q,
        keys,
        keys_at,
        values,
        values_at,
        mass,
        mass_at,
        slope,
        here,
        positions,
        positions_at,
        batch_row,
        head,
        first,
        0,
        number,
        scaling,
        softcap,
        HEAD_DIM,
        VALUE_DIM,
        KEYS_BITS,
        KEYS_WIDTH,
        KEYS_BYTES,
        KEYS_GROUPS,
        VALUES_BITS,
        VALUES_WIDTH,
        VALUES_BYTES,
        VALUES_GROUPS,
        BLOCK,
        PRECISION,
    )
    # Every row of the tile sees the new tokens up to its first row's own; the rest is a triangle.
    seen_by_all = (tile * ROWS // group + 1) // BLOCK * BLOCK
    seen = tl.minimum((tile * ROWS + ROWS - 1) // group + 1, number_new)
    for part in tl.static_range(2):
        highest, weight, summed = _attend_new(
            highest,
            weight,
            summed,
            q,
            new_keys + batch_row * new_keys_at[0] + head * new_keys_at[1],
            new_keys_at,
            new_values + batch_row * new_values_at[0] + head * new_values_at[1],
            new_values_at,
            new_mass,
            new_mass_at,
            slope,
            here,
            new_positions,
            new_positions_at,
            batch_row,
            head,
            token,
            0 if part == 0 else seen_by_all,
            seen_by_all if part == 0 else seen,
            scaling,
            softcap,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK,
            PRECISION,
            part == 1,
        )
    mean, log = finished(highest, weight, summed)
    mean = tl.where(wrong, float("nan"), mean)
    log = tl.where(wrong, float("nan"), log)
    at = out + batch_row * out_at[0] + heads * out_at[1] + token * out_at[2]
    tl.store(
        at[:, None] + value_channels[None, :] * out_at[3],
        mean.to(out.dtype.element_ty),
        mask=is_pair[:, None] & (value_channels < VALUE_DIM)[None, :],
    )
    logs = log_total + batch_row * log_total_at[0] + heads * log_total_at[1]
    tl.store(logs + token * log_total_at[2], log, mask=is_pair)


@triton.jit
def _attend_new(
    highest: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    keys_at: tl.tuple,
    values: tl.tensor,
    values_at: tl.tuple,
    mass: tl.tensor,
    mass_at: tl.tuple,
    slope: tl.tensor,
    here: tl.tensor,
    positions: tl.tensor,
    positions_at: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tl.tuple:
    """The streaming softmax over the new tokens ``begin .. end - 1`` of a head."""
    head_channels = tl.arange(0, q.shape[1]).to(tl.int64)
    value_channels = tl.arange(0, summed.shape[1]).to(tl.int64)
    for offset in range(begin, end, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        there = column < end
        tokens = column.to(tl.int64)
        k = tl.load(
            keys + tokens[:, None] * keys_at[2] + head_channels[None, :] * keys_at[3],
            mask=there[:, None] & (head_channels < HEAD_DIM)[None, :],
            other=0.0,
        )
        distance = None
        if slope is not None:
            places = positions + row * positions_at[0] + tokens * positions_at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = score(q, k, None, slope, distance, scaling, softcap, PRECISION)
        if mass is not None:
            masses = mass + row * mass_at[0] + head * mass_at[1] + tokens * mass_at[2]
            scores += tl.log2(tl.load(masses, mask=there, other=0.0))[None, :]
        if CAUSAL:
            scores = tl.where(column[None, :] <= token[:, None], scores, float("-inf"))
        v = tl.load(
            values + tokens[:, None] * values_at[2] + value_channels[None, :] * values_at[3],
            mask=there[:, None] & (value_channels < VALUE_DIM)[None, :],
            other=0.0,
        )
        highest, weight, summed = absorb(highest, weight, summed, scores, v, PRECISION)
    return highest, weight, summed


_attend_tuned = tuned(
    _attend_rows,
    ["HEAD_BLOCK", "VALUE_BLOCK", "MOST_ROWS", "KEYS_BITS", "VALUES_BITS", "PRECISION"],
    {"ROWS": 16, "BLOCK": 16, "warps": 4, "stages": 2},
    {"ROWS": 16, "BLOCK": 64, "warps": 4, "stages": 3},
    {"ROWS": 64, "BLOCK": 32, "warps": 4, "stages": 2},
    {"ROWS": 64, "BLOCK": 64, "warps": 4, "stages": 3},
    {"ROWS": 128, "BLOCK": 32, "warps": 8, "stages": 2},
    {"ROWS": 128, "BLOCK": 64, "warps": 8, "stages": 2},
    {"ROWS": 128, "BLOCK": 64, "warps": 8, "stages": 3},
)


def _check_new(
    sizes: Sizes, queries: Tensor, keys: Tensor, values: Tensor, mass: Tensor | None
) -> None:
    """Raises:
    InputError: new keys, values or masses that do not fit.
    """
    shape = (sizes.batch, sizes.kv_heads, sizes.queries)
    for name, new, dim in (("new_keys", keys, sizes.head_dim), ("new_values", values, sizes.value_dim)):
        if tuple(new.shape) != (*shape, dim):
            raise InputError(f"{name} must have shape {(*shape, dim)}, got {tuple(new.shape)}")
        check_dtype(name, new)
    check_column("new_mass", mass, shape, (torch.float32,))
    check_together(queries, keys, values, mass)
