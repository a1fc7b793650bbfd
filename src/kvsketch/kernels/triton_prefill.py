"""Attention of new queries over the ragged heads of a flat page and over the new tokens.

This is the attention of a prompt that is read in chunks: query i of q attends to every slot of its
head and to the new tokens up to its own. One pass over both uses a streaming softmax
(FlashAttention, Dao et al. 2022, 2205.14135), so that no scores are kept in memory. The queries of
all heads of a group are rows of the same tile and share its read of the slots.

A few queries over many slots leave most
of a GPU idle, since slots are not split here, unlike in ``triton_decode``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.kernels.flat_page import (
    FlatSlots,
    check,
    check_block,
    check_column,
    check_new,
    check_together,
    results_for,
)
from kvsketch.kernels.triton_slots import (
    New,
    against,
    attend_slots,
    begun,
    columns,
    finished,
    flat,
    log2_of,
    owned,
    place,
    scored,
    scores_of,
    strided,
    vectors,
    weigh,
    width_of,
)
from kvsketch.kernels.triton_support import launching, require
from kvsketch.kernels.triton_tuning import fitting, product
from kvsketch.observed import Observed

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
    asked: Observed,
    slots: FlatSlots,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    new_log_mass: Tensor | None = None,
    new_positions: Tensor | None = None,
    rows: int | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``estimator.attend`` of q queries per head over a flat page and, causally, over q new tokens.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]``; else as for
            ``triton_decode.decode``.
        slots: the page.
        new_keys: ``[batch, num_key_value_heads, q, head_dim]``, of the queries' own tokens.
        new_values: ``[batch, num_key_value_heads, q, value_dim]``.
        new_log_mass: float32 ``[batch, num_key_value_heads, q]``, ``NOTHING`` or -inf for
            padding, to which no query attends. None: all 0.
        new_positions: of the new tokens and queries, in the dtype of ``positions`` ``[batch, q]``.
            Needed for slopes, as ``positions`` are.
        rows: (query, head of the group) pairs per tile, a power of two >= 16. None:
            chosen by the size of the heads.
        block: slots or new tokens per tile, a power of two >= 16. None: likewise.

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
    sizes, queries = check(asked, slots), asked.queries
    require(queries)
    check_new(sizes, queries, new_keys, new_values, new_log_mass)
    if asked.slopes is not None:
        assert slots.positions is not None
        if new_positions is None:
            raise InputError("slopes (ALiBi) need new_positions")
        shape = (sizes.batch, sizes.queries)
        check_column("new_positions", new_positions, shape, (slots.positions.dtype,))
        check_together(queries, new_positions)
    check_block("rows", rows)
    check_block("block", block)
    out, log_total = results_for(queries, sizes)
    if out.numel() == 0:
        return out, log_total
    pairs, both = sizes.queries * sizes.group, sizes.batch * sizes.kv_heads
    if max(pairs, both * -(-pairs // 16)) > 2**30:
        raise UnsupportedError(f"{pairs} queries x heads of a group, {both} rows x KV heads")

    page = flat(slots)
    # A row of a tile is a query times a group of channels that has its own scale.
    each = max(page.key.tiles.value, page.value.tiles.value)
    width, size = width_of(page.key) + width_of(page.value), queries.element_size()
    usual = _MANY if pairs * each > 16 else _FEW
    tile = dict(fitting(width, size, 16, *usual))
    tile.update({k: v for k, v in (("ROWS", rows), ("BLOCK", block)) if v is not None})
    grid = (both * -(-pairs // max(16, tile["ROWS"] // each)),)

    tokens = (new_keys, new_values, new_log_mass, new_positions)
    with launching(queries):
        _attend_rows[grid](
            strided(queries),
            page,
            New(*map(strided, tokens)),
            scores_of(asked),
            strided(out),
            strided(log_total),
            sizes.kv_heads,
            sizes.group,
            sizes.queries,
            HEAD_BLOCK=width_of(page.key),
            VALUE_BLOCK=width_of(page.value),
            PRECISION="tf32x3",  # three products of the tensor cores for each of float32 numbers
            enable_fp_fusion=True,
            **tile,
        )
    return out, log_total


@triton.jit
def _attend_rows(
    queries: tl.tuple,
    page: tl.tuple,
    new: tl.tuple,
    scoring: tl.tuple,
    out: tl.tuple,
    log_total: tl.tuple,
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
    at = queries.tensor + row * queries.at[0] + heads * queries.at[1] + token * queries.at[2]
    q = vectors(at, queries.at[3], is_pair, head_channels, page.key.dim)
    highest, weight = begun(scoring, heads, is_pair, True)
    slope = None
    here = None
    if scoring.slopes is not None:
        slopes = scoring.slopes.tensor + heads * scoring.slopes.at[0]
        slope = tl.load(slopes, mask=is_pair, other=0.0).to(tl.float32)
        places = new.positions.tensor + row * new.positions.at[0] + token * new.positions.at[1]
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
    outs = out.tensor + row * out.at[0] + heads * out.at[1] + token * out.at[2]
    tl.store(
        outs[:, None] + value_channels[None, :] * out.at[3],
        mean.to(out.tensor.dtype.element_ty),
        mask=is_pair[:, None] & (value_channels < page.value.dim)[None, :],
    )
    totals = log_total.tensor + row * log_total.at[0] + heads * log_total.at[1]
    tl.store(totals + token * log_total.at[2], log, mask=is_pair)


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
    keys = new.key.tensor + row * new.key.at[0] + head * new.key.at[1]
    values = new.value.tensor + row * new.value.at[0] + head * new.value.at[1]
    for offset in range(begin, end, BLOCK):
        tokens = (offset + tl.arange(0, BLOCK)).to(tl.int64)
        there = tokens < end
        at = keys + tokens * new.key.at[2]
        k = vectors(at, new.key.at[3], there, head_channels, key.dim)
        distance = None
        if slope is not None:
            places = new.positions.tensor + row * new.positions.at[0] + tokens * new.positions.at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = against(q, k, PRECISION)
        scores = scored(scores, None, slope, distance, scoring)
        if new.mass is not None:
            masses = new.mass.tensor + row * new.mass.at[0] + head * new.mass.at[1]
            scores += log2_of(masses + tokens * new.mass.at[2], there)[None, :]
        if CAUSAL:
            scores = tl.where(tokens[None, :] <= token[:, None], scores, float("-inf"))
        at = values + tokens * new.value.at[2]
        v = vectors(at, new.value.at[3], there, value_channels, value.dim)
        highest, weight, keep, share = weigh(highest, weight, scores)
        summed = product(share.to(v.dtype), v, summed * keep[:, None], PRECISION)
    return highest, weight, summed
