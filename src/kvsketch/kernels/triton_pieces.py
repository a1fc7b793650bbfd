"""The pieces into which heads are split for one query per head: how many, and the kernel that reads
one of them.

The tile sizes are from a few trials on an H200 with bfloat16 heads of 128, which no benchmark
repeats; other sizes of heads were not tried.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.kernels.flat_page import Sizes
from kvsketch.kernels.triton_arguments import Flat, KernelScores, at, width_of
from kvsketch.kernels.triton_slots import LOG2E, attend_slots, columns, finished, owned, place
from kvsketch.kernels.triton_support import Launches
from kvsketch.kernels.triton_tuning import fitting, padded

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


class Pieces:
    """The attention of one query per head over the pieces of all heads of a page.

    Args:
        sizes: of the launch.
        size: bytes of an element of the queries.
        most, splits, block: as for ``triton_decode.decode``.
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
            queries,
            at(queries),
            self._page,
            self._scoring,
            query_positions,
            at(query_positions),
            out,
            at(out),
            logs,
            at(logs),
            *self._numbers,
        )
        changing = [t for t in (queries, query_positions, out, logs) if t is not None]
        constants = {**self._constants, "WHOLE": whole}
        launch = self._launches[whole]
        launch(_attend_piece, self._grid, changing, arguments, constants, self._options)


@triton.jit
def _attend_piece(
    queries: tl.tensor,
    queries_at: tl.tuple,
    page: tl.tuple,
    scoring: tl.tuple,
    query_positions: tl.tensor,
    query_positions_at: tl.tuple,
    out: tl.tensor,
    out_at: tl.tuple,
    logs: tl.tensor,
    logs_at: tl.tuple,
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

    at = queries + row * queries_at[0] + heads[:, None] * queries_at[1]
    q = tl.load(
        at + head_channels[None, :] * queries_at[3],
        mask=is_member[:, None] & (head_channels < page.key.dim)[None, :],
        other=0.0,
    )
    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    if scoring.sinks is not None:  # a slot without a value, in the first piece
        sink = tl.load(scoring.sinks + heads * scoring.sinks_at[0], mask=is_member, other=0.0)
        highest = tl.where(split == 0, sink.to(tl.float32) * LOG2E, highest)
        weight = tl.where(highest != float("-inf"), 1.0, weight)
    slope = None
    here = None
    if scoring.slopes is not None:
        slope = tl.load(scoring.slopes + heads * scoring.slopes_at[0], mask=is_member, other=0.0)
        slope = slope.to(tl.float32)
        if query_positions is not None:
            places = query_positions + row * query_positions_at[0] + tl.zeros_like(heads)
            here = tl.load(places)
        else:
            last = first + number - 1 + tl.zeros_like(heads)
            places = page.positions + stored_at * page.positions_at[0]
            places += last * page.positions_at[1]
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
    outs = out + row * out_at[0] + heads[:, None] * out_at[1] + piece_at * out_at[2]
    tl.store(
        outs + value_channels[None, :] * out_at[3],
        mean.to(out.dtype.element_ty),
        mask=is_wanted[:, None] & (value_channels < page.value.dim)[None, :],
    )
    totals = logs + row * logs_at[0] + heads * logs_at[1] + piece_at * logs_at[2]
    tl.store(totals, log, mask=is_member)
