"""Attention over a head from attention over pieces of it: the second half of flash-decoding."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.kernels.triton_slots import LN2, LOG2E


@triton.jit
def combine(
    parts: tl.tensor,
    parts_at: tl.tuple,
    logs: tl.tensor,
    logs_at: tl.tuple,
    out: tl.tensor,
    out_at: tl.tuple,
    log_total: tl.tensor,
    log_total_at: tl.tuple,
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
    at = logs + row * logs_at[0] + head * logs_at[1] + split * logs_at[2]
    log = tl.load(at, mask=split < splits, other=float("-inf"))
    highest = tl.max(log, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2((log - shift) * LOG2E)
    total = tl.sum(weight, axis=0)
    at = parts + row * parts_at[0] + head * parts_at[1] + split[:, None] * parts_at[2]
    mean = tl.load(
        at + channels[None, :] * parts_at[3],
        mask=(log != float("-inf"))[:, None] & (channels < VALUE_DIM)[None, :],
        other=0.0,
    )
    nothing = total == 0
    mean = tl.sum(mean * weight[:, None], axis=0) / tl.where(nothing, 1.0, total)
    at = out + row * out_at[0] + head * out_at[1] + channels * out_at[3]
    tl.store(at, mean.to(out.dtype.element_ty), mask=channels < VALUE_DIM)
    if tl.program_id(1) == 0:
        both = shift + tl.log2(tl.where(nothing, 1.0, total)) * LN2
        place = log_total + row * log_total_at[0] + head * log_total_at[1]
        tl.store(place, tl.where(nothing, float("-inf"), both))
