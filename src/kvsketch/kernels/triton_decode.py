"""Attention of one query per head over the ragged heads of a flat page, split over the slots.

Every KV head is split into pieces, and each piece is read by its own program, so that few heads
fill the GPU as well. A second, small kernel combines the pieces (flash-decoding: Dao, Haziza, Massa
and Sizov 2023; split-K softmax). The query heads of a group share the read of a tile. The number of
programs depends only on shapes and ``most``, so that a launch can be recorded in a CUDA graph and
replayed while the counts on the device change.

A kernel is compiled at its first call, which must happen before a CUDA graph is recorded.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.kernels.flat_page import Page, Sizes, check, check_block, check_together, given
from kvsketch.kernels.triton_arguments import KernelScores, at, flat
from kvsketch.kernels.triton_combine import combine
from kvsketch.kernels.triton_pieces import Pieces, scratch_for, splits_for
from kvsketch.kernels.triton_support import Launches, require
from kvsketch.kernels.triton_tuning import padded


def decode(
    queries: Tensor,
    keys: Page,
    values: Page,
    log_mass: Tensor | None,
    start: Tensor,
    count: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    pages: Tensor | None = None,
    most: int | None = None,
    splits: int | None = None,
    block: int | None = None,
    out: Tensor | None = None,
    log_total: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``estimator.attend`` of one query per head over a flat page, computed in float32.

    Head h of row b has the slots ``start[b, h] .. start[b, h] + count[b, h] - 1`` of row b. Counts
    are not checked on the host. The output of a head whose slots do not lie within the page is NaN.

    Args:
        queries: float32, float16 or bfloat16 ``[batch, num_attention_heads, 1, head_dim]`` (or 0
            queries); query head h uses KV head ``h // (num_attention_heads /
            num_key_value_heads)``. Any strides, as for all that follows.
        keys: ``[batch, total, head_dim]``, or quantised.
        values: means u / m, ``[batch, total, value_dim]``, or quantised.
        log_mass: log m, float32 ``[batch, total]``; ``NOTHING`` or -inf: dead. None: all 0.
        start, count: int32 or int64 ``[batch, num_key_value_heads]``.
        scaling: multiplies the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[num_attention_heads]``, logits of attention sinks.
        slopes: ``[num_attention_heads]``, ALiBi: adds ``slope * (position - query's position)``.
        positions: of the slots, float32, int32 or int64 ``[batch, total]``. Needed for slopes.
        query_positions: ``[batch]``, in the dtype of ``positions``. Needed for slopes with sinks.
            None: the position of the head's last slot, which does not change the output but shifts
            ``log_total``.
        pages: for each row of ``queries``, the row of ``keys``, ``values``, ``log_mass`` and
            ``positions`` that has its slots, int32 or int64 ``[batch]``, not checked on the host.
            These tensors may then have any number of rows. None: row b of all of them.
        most: an upper bound of ``count``, which determines the number of programs. None: total. If
            it is too small, the call is slower, but no slot is left out.
        splits: pieces per head; None: ``splits_for(batch, num_key_value_heads, most)``.
        block: slots per tile, a power of two >= 16. None: chosen by the size of the heads.
        out, log_total: tensors into which the results are written.
        scratch: ``scratch_for(queries, value_dim, splits)``. Not used for one split.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]`` in the dtype of the queries, and the
        logarithm of the denominator, ``sum_s m_s exp(score_s)`` (plus exp(sink)), float32 ``[batch,
        num_attention_heads, 1]``. For a head without slots they are 0, and -inf or its sink.

    Raises:
        InputError: shapes, dtypes or devices do not fit together; a number out of range.
        UnsupportedError: float64, gradients, head_dim or value_dim above 1,024, tensors that are
            not on a CUDA device (outside of Triton's interpreter).
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
    if sizes.queries > 1:
        raise InputError(f"queries has {sizes.queries} queries per head: decode takes one")
    if sinks is not None and slopes is not None and query_positions is None:
        raise InputError("sinks beside slopes (ALiBi) need query_positions")
    _check_launch(sizes, queries, positions, query_positions, most, splits, block)
    shape = (sizes.batch, sizes.heads, sizes.queries)
    out = given("out", out, queries, (*shape, sizes.value_dim), queries.dtype)
    log_total = given("log_total", log_total, queries, shape, torch.float32)
    if out.numel() == 0:
        return out, log_total
    most = sizes.total if most is None else min(most, sizes.total)
    if splits is None:
        splits = splits_for(sizes.batch, sizes.kv_heads, most)
    page = flat(keys, values, log_mass, positions, start, count, pages)
    scoring = KernelScores(float(scaling), softcap, sinks, at(sinks), slopes, at(slopes))
    size = queries.element_size()
    piecewise = Pieces(page, scoring, sizes, size, most, splits, block)
    if splits == 1:
        piecewise(queries, query_positions, out, log_total, True)
        return out, log_total
    parts, logs = scratch_for(queries, sizes.value_dim, splits) if scratch is None else scratch
    wanted = (sizes.batch, sizes.heads, splits)
    given("scratch[0]", parts, queries, (*wanted, sizes.value_dim), torch.float32)
    given("scratch[1]", logs, queries, wanted, torch.float32)
    piecewise(queries, query_positions, parts, logs, False)
    combined(parts, logs, out, log_total)
    return out, log_total


_COMBINED = Launches()


def combined(parts: Tensor, logs: Tensor, out: Tensor, log_total: Tensor) -> None:
    """Write the attention over all pieces into ``out`` and ``log_total``, see ``decode``."""
    (batch, heads, splits, dim), width = parts.shape, min(padded(parts.shape[3]), 64)
    pairs = [(t, at(t)) for t in (parts, logs, out, log_total)]
    _COMBINED(
        combine,
        (batch * heads, -(-dim // width)),
        (parts, logs, out, log_total),
        (*itertools.chain(*pairs), heads, splits),
        {"VALUE_DIM": dim, "VALUE_BLOCK": width, "SPLITS_BLOCK": padded(splits, 2)},
    )


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
