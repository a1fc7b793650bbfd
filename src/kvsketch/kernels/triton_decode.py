"""Attention of one query per head over the ragged heads of a flat page, split over the slots.

Every KV head is split into pieces, and each piece is read by its own program, so that few heads
fill the GPU as well. A second, small kernel combines the pieces (flash-decoding: Dao, Haziza, Massa
and Sizov 2023; split-K softmax). The query heads of a group share the read of a tile. The number of
programs depends only on shapes and ``most``, so that a launch can be recorded in a CUDA graph and
replayed while the counts on the device change.

The tile sizes are from a few trials on an H200 with bfloat16 heads of 128, which no benchmark
repeats; other sizes of heads were not tried. A kernel is compiled at its first call, which must
happen before a CUDA graph is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.kernels.flat_page import (
    FlatSlots,
    Sizes,
    check,
    check_block,
    check_together,
    results_for,
)
from kvsketch.kernels.triton_slots import (
    LN2,
    LOG2E,
    Flat,
    KernelScores,
    attend_slots,
    begun,
    columns,
    finished,
    flat,
    owned,
    place,
    scores_of,
    strided,
    vectors,
    width_of,
)
from kvsketch.kernels.triton_support import Launches, require
from kvsketch.kernels.triton_tuning import fitting, padded
from kvsketch.observed import Observed

# Programs to aim for: a few per multiprocessor of the largest GPUs (132 in an H200), since heads
# of different sizes leave some of them without work.
_PROGRAMS = 1024
# A piece has at least so many slots, and pieces end at multiples of this number.
_PIECE = 256
_MOST_SPLITS = 128
#: Query heads of a tile. A larger group takes several programs.
_MOST_ROWS = 64
# Tiles of slots, and of slots in 4 bits; smaller ones for wide heads.
_EXACT = (
    {"BLOCK": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK": 32, "num_warps": 4, "num_stages": 2},
    {"BLOCK": 16, "num_warps": 4, "num_stages": 2},
)
_SMALL = ({"BLOCK": 64, "num_warps": 2, "num_stages": 3}, *_EXACT[2:])


def splits_for(batch: int, kv_heads: int, most: int) -> int:
    """The number of pieces into which heads of at most ``most`` slots are split."""
    wanted = -(-_PROGRAMS // max(1, batch * kv_heads))
    return max(1, min(wanted, -(-most // _PIECE), _MOST_SPLITS))


def scratch_for(queries: Tensor, value_dim: int, splits: int) -> tuple[Tensor, Tensor]:
    """Tensors for the results of the pieces: float32 ``[batch, num_attention_heads, splits,
    value_dim]`` and ``[batch, num_attention_heads, splits]``."""
    shape = (*queries.shape[:2], splits)
    return (
        torch.empty(*shape, value_dim, dtype=torch.float32, device=queries.device),
        torch.empty(shape, dtype=torch.float32, device=queries.device),
    )


def decode(
    asked: Observed,
    slots: FlatSlots,
    *,
    query_positions: Tensor | None = None,
    most: int | None = None,
    splits: int | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``estimator.attend`` of one query per head over a flat page, computed in float32.

    Counts are not checked on the host. The output of a head whose slots do not lie within the page
    is NaN.

    Args:
        asked: float32, float16 or bfloat16 queries ``[batch, num_attention_heads, 1, head_dim]``
            (or 0 queries), of any strides, with their slopes and sinks.
        slots: the page.
        query_positions: ``[batch]``, in the dtype of ``positions``. Needed for slopes with sinks.
            None: the position of the head's last slot, which does not change the output but shifts
            ``log_total``.
        most: an upper bound of ``count``, which determines the number of programs. None: total. If
            it is too small, the call is slower, but no slot is left out.
        splits: pieces per head; None: ``splits_for(batch, num_key_value_heads, most)``.
        block: slots per tile, a power of two >= 16. None: chosen by the size of the heads.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]`` in the dtype of the queries, and the
        logarithm of the denominator, ``sum_s m_s exp(score_s)`` (plus exp(sink)), float32 ``[batch,
        num_attention_heads, 1]``. For a head without slots they are 0, and -inf or its sink.

    Raises:
        InputError: shapes, dtypes or devices do not fit together; a number out of range.
        UnsupportedError: float64, gradients, head_dim or value_dim above 1,024, tensors that are
            not on a CUDA device (outside of Triton's interpreter).
    """
    sizes, queries = check(asked, slots), asked.queries
    require(queries)
    if sizes.queries > 1:
        raise InputError(f"queries has {sizes.queries} queries per head: decode takes one")
    if asked.sinks is not None and asked.slopes is not None and query_positions is None:
        raise InputError("sinks beside slopes (ALiBi) need query_positions")
    _check_launch(sizes, queries, slots.positions, query_positions, most, splits, block)
    out, log_total = results_for(queries, sizes)
    if out.numel() == 0:
        return out, log_total
    most = sizes.total if most is None else min(most, sizes.total)
    if splits is None:
        splits = splits_for(sizes.batch, sizes.kv_heads, most)
    size = queries.element_size()
    piecewise = Pieces(flat(slots), scores_of(asked), sizes, size, most, splits, block)
    if splits == 1:
        piecewise(queries, query_positions, out, log_total, True)
        return out, log_total
    parts, logs = scratch_for(queries, sizes.value_dim, splits)
    piecewise(queries, query_positions, parts, logs, False)
    combined(parts, logs, out, log_total)
    return out, log_total


class Pieces:
    """The attention of one query per head over the pieces of all heads of a page.

    Args:
        sizes: of the launch.
        size: bytes of an element of the queries.
        most, splits, block: as for ``decode``.
    """

    def __init__(
        self,
        page: Flat,
        scoring: KernelScores,
        sizes: Sizes,
        size: int,
        most: int,
        splits: int,
        block: int | None = None,
    ) -> None:
        self.splits = splits
        self._page, self._scoring = page, scoring
        # Rows of products: queries times the groups of channels that have their own scale.
        each = page.key.tiles.value, page.value.tiles.value
        most_rows = max(16 // min(each), _MOST_ROWS // max(each))
        rows = min(padded(sizes.group, 16 // min(each)), most_rows)
        tiles = -(-sizes.group // rows)
        unit = _PIECE if block is None else 1
        self._numbers = sizes.kv_heads, sizes.group, -(-most // (splits * unit)) * unit, splits
        self._grid = sizes.batch * sizes.kv_heads * tiles, splits
        self._constants: dict[str, Any] = {
            "HEAD_BLOCK": width_of(page.key),
            "VALUE_BLOCK": width_of(page.value),
            "GROUP_BLOCK": rows,
            "GROUP_TILES": tiles,
            "WHOLE": False,
        }
        width = self._constants["HEAD_BLOCK"] + self._constants["VALUE_BLOCK"]
        usual = _SMALL if page.value.bits.value == 4 else _EXACT
        tile = fitting(width, size, rows * max(each), *usual)
        self._constants["BLOCK"] = tile["BLOCK"] if block is None else block
        self._options = {name: tile[name] for name in ("num_warps", "num_stages")}
        self._launches = Launches(), Launches()

    def __call__(
        self,
        queries: Tensor,
        query_positions: Tensor | None,
        out: Tensor,
        logs: Tensor,
        whole: bool,
    ) -> None:
        """Write the results into ``out`` and ``logs``, whose third axis is the pieces, or if
        ``whole``, the queries."""
        arguments = (
            strided(queries),
            self._page,
            self._scoring,
            strided(query_positions),
            strided(out),
            strided(logs),
            *self._numbers,
        )
        changing = [t for t in (queries, query_positions, out, logs) if t is not None]
        constants = {**self._constants, "WHOLE": whole}
        launch = self._launches[whole]
        launch(_attend_piece, self._grid, changing, arguments, constants, self._options)


_COMBINED = Launches()


def combined(parts: Tensor, logs: Tensor, out: Tensor, log_total: Tensor) -> None:
    """Write the attention over all pieces into ``out`` and ``log_total``, see ``decode``."""
    (batch, heads, splits, dim), width = parts.shape, min(padded(parts.shape[3]), 64)
    tensors = parts, logs, out, log_total
    _COMBINED(
        _combine,
        (batch * heads, -(-dim // width)),
        tensors,
        (*map(strided, tensors), heads, splits),
        {"VALUE_DIM": dim, "VALUE_BLOCK": width, "SPLITS_BLOCK": padded(splits, 2)},
    )


@triton.jit
def _combine(
    parts: tl.tuple,
    logs: tl.tuple,
    out: tl.tuple,
    log_total: tl.tuple,
    heads: tl.tensor,
    splits: tl.tensor,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    """The mean over the pieces of a query head, weighted by their totals. There is one program per
    query head and ``VALUE_BLOCK`` channels. A piece whose logarithm is -inf is not read."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    channels = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK).to(tl.int64)
    split = tl.arange(0, SPLITS_BLOCK).to(tl.int64)
    at = logs.tensor + row * logs.at[0] + head * logs.at[1] + split * logs.at[2]
    log = tl.load(at, mask=split < splits, other=float("-inf"))
    highest = tl.max(log, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2((log - shift) * LOG2E)
    total = tl.sum(weight, axis=0)
    at = parts.tensor + row * parts.at[0] + head * parts.at[1] + split[:, None] * parts.at[2]
    mean = tl.load(
        at + channels[None, :] * parts.at[3],
        mask=(log != float("-inf"))[:, None] & (channels < VALUE_DIM)[None, :],
        other=0.0,
    )
    nothing = total == 0
    mean = tl.sum(mean * weight[:, None], axis=0) / tl.where(nothing, 1.0, total)
    at = out.tensor + row * out.at[0] + head * out.at[1] + channels * out.at[3]
    tl.store(at, mean.to(out.tensor.dtype.element_ty), mask=channels < VALUE_DIM)
    if tl.program_id(1) == 0:
        both = shift + tl.log2(tl.where(nothing, 1.0, total)) * LN2
        place = log_total.tensor + row * log_total.at[0] + head * log_total.at[1]
        tl.store(place, tl.where(nothing, float("-inf"), both))


@triton.jit
def _attend_piece(
    queries: tl.tuple,
    page: tl.tuple,
    scoring: tl.tuple,
    query_positions: tl.tuple,
    out: tl.tuple,
    logs: tl.tuple,
    kv_heads: tl.tensor,
    group: tl.tensor,
    piece: tl.tensor,
    splits: tl.tensor,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attend to piece ``program_id(1)`` of a KV head, for a tile of query heads of its group."""
    program, split = tl.program_id(0), tl.program_id(1)
    tile, program = program % GROUP_TILES, program // GROUP_TILES
    row, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    head_channels = columns(page.key, HEAD_BLOCK)
    value_channels = columns(page.value, VALUE_BLOCK)
    member = tile * GROUP_BLOCK + tl.arange(0, GROUP_BLOCK)
    is_member = member < group
    heads = head * group + member

    first, number, wrong = owned(page, row, head)
    stored_at = place(page, row)
    begin = tl.minimum(split * piece, number)
    end = tl.minimum(begin + piece, number)
    if split == splits - 1:  # no slot is left out if ``most`` is too small
        end = number

    at = queries.tensor + row * queries.at[0] + heads * queries.at[1]
    q = vectors(at, queries.at[3], is_member, head_channels, page.key.dim)
    highest, weight = begun(scoring, heads, is_member, split == 0)
    slope = None
    here = None
    if scoring.slopes is not None:
        slopes = scoring.slopes.tensor + heads * scoring.slopes.at[0]
        slope = tl.load(slopes, mask=is_member, other=0.0).to(tl.float32)
        if query_positions is not None:
            places = query_positions.tensor + row * query_positions.at[0] + tl.zeros_like(heads)
            here = tl.load(places)
        else:
            last = first + number - 1 + tl.zeros_like(heads)
            places = page.positions.tensor + stored_at * page.positions.at[0]
            places += last * page.positions.at[1]
            here = tl.load(places, mask=is_member & (last >= first), other=0)
    highest, weight, summed = attend_slots(
        highest,
        weight,
        q,
        page,
        scoring,
        slope,
        here,
        stored_at,
        head,
        first,
        begin,
        end,
        VALUE_BLOCK,
        BLOCK,
        "ieee",
    )
    mean, log = finished(highest, weight, summed, wrong)
    # The third axis of the output has one query or, with several splits, one place for each split.
    piece_at = split.to(tl.int64)
    is_wanted = is_member
    if not WHOLE:  # of a piece without slots, only the logarithm is written
        is_wanted = is_member & (log != float("-inf"))
    outs = out.tensor + row * out.at[0] + heads[:, None] * out.at[1] + piece_at * out.at[2]
    tl.store(
        outs + value_channels[None, :] * out.at[3],
        mean.to(out.tensor.dtype.element_ty),
        mask=is_wanted[:, None] & (value_channels < page.value.dim)[None, :],
    )
    totals = logs.tensor + row * logs.at[0] + heads * logs.at[1] + piece_at * logs.at[2]
    tl.store(totals, log, mask=is_member)


def _check_launch(
    sizes: Sizes,
    queries: Tensor,
    positions: Tensor | None,
    query_positions: Tensor | None,
    most: int | None,
    splits: int | None,
    block: int | None,
) -> None:
    """Raises:
    InputError: a number out of range, or query_positions that do not fit.
    """
    if query_positions is not None:
        if positions is None:
            raise InputError("query_positions need positions")
        if query_positions.shape != (sizes.batch,) or query_positions.dtype != positions.dtype:
            raise InputError(
                f"query_positions must be {positions.dtype} [{sizes.batch}] as positions, got "
                f"{query_positions.dtype} {tuple(query_positions.shape)}"
            )
        check_together(queries, query_positions)
    for name, number, largest in (("most", most, 2**31 - 1), ("splits", splits, 2**15)):
        if number is not None and not int(name == "splits") <= number <= largest:
            raise InputError(
                f"{name}={number!r} must be an int in {int(name == 'splits')} .. {largest}"
            )
    check_block("block", block)
