"""What the attention kernels share: a head's slots, tile by tile, with a streaming softmax.

The streaming softmax is that of FlashAttention (Dao et al. 2022, 2205.14135, Algorithm 1): a
maximum, a total and a weighted sum per query, each rescaled when a tile raises the maximum. Scores
are kept in units of log 2, since the hardware has exp2.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .flat_page import Page
from .triton_support import interpreted

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    page: tl.tuple,
    at: tl.tuple,
    row: tl.tensor,
    slots: tl.tensor,
    there: tl.tensor,
    channels: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Slots of a row, ``[slots, channels]``; 0 where there is none. All numbers are int64.

    A page in 8 or 4 bits comes as ``low + step * code`` in float32: its unit and offset are left
    to the caller, who needs them once per query and not once per slot."""
    if DIM == channels.shape[0]:
        mask = there[:, None]
    else:
        mask = there[:, None] & (channels < DIM)[None, :]
    start = page[0] + row * at[0][0]
    if BITS == 0:
        places = start + slots[:, None] * at[0][1] + channels[None, :] * at[0][2]
        return tl.load(places, mask=mask, other=0.0)
    else:
        places = start + slots[:, None] * at[0][1] + (channels % BYTES)[None, :] * at[0][2]
        code = tl.load(places, mask=mask, other=0)
        if BITS == 4:
            code = (code >> (channels // BYTES * 4)[None, :].to(tl.uint8)) & 15
        # A zero point and a scale per group of channels: loaded per slot, picked by channel.
        lows = page[1] + row * at[1][0] + slots * at[1][1]
        steps = page[2] + row * at[2][0] + slots * at[2][1]
        low = tl.load(lows, mask=there, other=0.0)[:, None]
        step = tl.load(steps, mask=there, other=0.0)[:, None]
        for i in tl.static_range(1, GROUPS):
            lows += at[1][2]
            steps += at[2][2]
            mine = (channels // WIDTH == i)[None, :]
            low = tl.where(mine, tl.load(lows, mask=there, other=0.0)[:, None], low)
            step = tl.where(mine, tl.load(steps, mask=there, other=0.0)[:, None], step)
        return code.to(tl.float32) * step.to(tl.float32) + low.to(tl.float32)


@triton.jit
def load_unit(
    page: tl.tuple,
    at: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    channels: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """The unit of each channel of a quantised page in one head, float32."""
    places = page[3] + row * at[3][0] + head * at[3][1] + channels * at[3][3]
    return tl.load(places, mask=channels < DIM, other=0.0)


@triton.jit
def load_offset(
    page: tl.tuple,
    at: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    channels: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """The centre of each channel of a quantised page in one head, float32; 0 where it has none."""
    if page[4] is not None:
        places = page[4] + row * at[4][0] + head * at[4][1] + channels * at[4][3]
        return tl.load(places, mask=channels < DIM, other=0.0)
    else:
        return tl.zeros(channels.shape, tl.float32)


@triton.jit
def capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """``softcap * tanh(scores / softcap)``: from exp, which may be infinite, and near 0, where that
    would lose digits, from the series of tanh."""
    x = scores / softcap
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    far = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    return softcap * tl.where(square < 0.01, near, far)


@triton.jit
def score(
    q: tl.tensor,
    k: tl.tensor,
    constant: tl.tensor,
    slope: tl.tensor,
    distance: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Scores of queries ``[rows, channels]`` and keys ``[slots, channels]`` in units of log 2."""
    if q.dtype == k.dtype:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    else:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision=PRECISION)
    scores = scores * scaling
    if constant is not None:
        scores += constant[:, None]
    if softcap is not None:
        scores = capped(scores, softcap)
    if slope is not None:
        scores += slope[:, None] * distance
    return scores * LOG2E


@triton.jit
def absorb(
    highest: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    scores: tl.tensor,
    v: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tuple:
    """The running maximum and total ``[rows]`` and weighted sum ``[rows, value channels]`` after
    one more tile: scores ``[rows, slots]`` in units of log 2, -inf where a query does not look, and
    values ``[slots, value channels]``."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(highest - shift)
    share = tl.exp2(scores - shift[:, None])
    weight = weight * keep + tl.sum(share, axis=1)
    summed = tl.dot(share.to(v.dtype), v, acc=summed * keep[:, None], input_precision=PRECISION)
    return higher, weight, summed


@triton.jit
def owned(
    start: tl.tensor,
    start_at: tl.tuple,
    count: tl.tensor,
    count_at: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    total: tl.tensor,
) -> tl.tuple:
    """A head's first slot, how many it has, and whether they are not all in the page (then 0)."""
    first = tl.load(start + row * start_at[0] + head * start_at[1]).to(tl.int64)
    number = tl.load(count + row * count_at[0] + head * count_at[1]).to(tl.int64)
    wrong = (first < 0) | (number < 0) | (first > total) | (number > total - first)
    return first, tl.where(wrong, 0, number).to(tl.int32), wrong


@triton.jit
def attend_slots(
    highest: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    q: tl.tensor,
    keys: tl.tuple,
    keys_at: tl.tuple,
    values: tl.tuple,
    values_at: tl.tuple,
    mass: tl.tensor,
    mass_at: tl.tuple,
    slope: tl.tensor,
    here: tl.tensor,
    positions: tl.tensor,
    positions_at: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS_BITS: tl.constexpr,
    KEYS_WIDTH: tl.constexpr,
    KEYS_BYTES: tl.constexpr,
    KEYS_GROUPS: tl.constexpr,
    VALUES_BITS: tl.constexpr,
    VALUES_WIDTH: tl.constexpr,
    VALUES_BYTES: tl.constexpr,
    VALUES_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:
    """The streaming softmax over the slots ``first + begin .. first + end - 1`` of a row; no value
    may have been added before."""
    head_channels = tl.arange(0, q.shape[1]).to(tl.int64)
    value_channels = tl.arange(0, summed.shape[1]).to(tl.int64)
    constant = None
    if KEYS_BITS != 0:  # <q, offset + unit x> = <q, offset> + <unit q, x>
        wide = q.to(tl.float32)
        centre = load_offset(keys, keys_at, row, head, head_channels, HEAD_DIM)
        constant = tl.sum(wide * centre[None, :], axis=1) * scaling
        unit = load_unit(keys, keys_at, row, head, head_channels, HEAD_DIM)
        q = (wide * unit[None, :]).to(q.dtype)
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        there = index < end
        slots = first + index
        k = load_tile(
            keys,
            keys_at,
            row,
            slots,
            there,
            head_channels,
            HEAD_DIM,
            KEYS_BITS,
            KEYS_WIDTH,
            KEYS_BYTES,
            KEYS_GROUPS,
        )
        if KEYS_BITS != 0:
            k = k.to(q.dtype)
        distance = None
        if slope is not None:
            places = positions + row * positions_at[0] + slots * positions_at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = score(q, k, constant, slope, distance, scaling, softcap, PRECISION)
        # One addition for the mass and for the end of the slots.
        if mass is not None:
            masses = mass + row * mass_at[0] + slots * mass_at[1]
            bias = tl.log2(tl.load(masses, mask=there, other=0.0))
        else:
            bias = tl.where(there, 0.0, float("-inf"))
        v = load_tile(
            values,
            values_at,
            row,
            slots,
            there,
            value_channels,
            VALUE_DIM,
            VALUES_BITS,
            VALUES_WIDTH,
            VALUES_BYTES,
            VALUES_GROUPS,
        )
        if VALUES_BITS != 0:
            v = v.to(q.dtype)
        scores += bias[None, :]
        highest, weight, summed = absorb(highest, weight, summed, scores, v, PRECISION)
    if VALUES_BITS != 0:
        unit = load_unit(values, values_at, row, head, value_channels, VALUE_DIM)
        summed *= unit[None, :]
    return highest, weight, summed


@triton.jit
def finished(highest: tl.tensor, weight: tl.tensor, summed: tl.tensor) -> tl.tuple:
    """The mean of the values, and the natural logarithm of the total: 0 and -inf where it is 0."""
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    nothing = weight == 0  # and not weight > 0: what is not a number must stay visible
    mean = tl.where(nothing[:, None], 0.0, summed / tl.where(nothing, 1.0, weight)[:, None])
    log = (shift + tl.log2(tl.where(nothing, 1.0, weight))) * LN2
    return mean, tl.where(nothing, float("-inf"), log)


def pointers(page: Page) -> tuple[Tensor | None, ...]:
    """A page as the kernels take it."""
    if isinstance(page, Tensor):
        return (page,)
    return (page.codes, page.low, page.step, page.unit, page.offset)


def strides(page: Page) -> tuple[tuple[int, ...], ...]:
    """Of each of ``pointers``; a unit that all channels share has a stride of 0."""
    if isinstance(page, Tensor):
        return (page.stride(),)
    held = [t.stride() if t is not None else (0,) * 4 for t in pointers(page)]
    if page.unit.shape[3] == 1:
        held[3] = (*held[3][:3], 0)
    return tuple(held)


def constants(name: str, page: Page) -> dict[str, int]:
    """The compile-time arguments ``<name>_BITS`` ... of a page."""
    if isinstance(page, Tensor):
        layout = (0, 1, 1, 1)
    else:
        layout = (page.bits, page.width, page.codes.shape[2], page.low.shape[2])
    return dict(
        zip((f"{name}_{part}" for part in ("BITS", "WIDTH", "BYTES", "GROUPS")), layout, strict=True)
    )


def padded(count: int, least: int = 16) -> int:
    """The power of two a tile of ``count`` rows or channels takes."""
    return max(least, triton.next_power_of_2(count))


def tuned(kernel: Any, key: list[str], *choices: dict[str, int]) -> Any:
    """``triton.autotune`` over tile sizes, ``warps`` and ``stages``; ``kernel`` in the interpreter.

    Choices that cannot fit (whose compilation alone may take a minute) are left out; the first one
    should be the smallest."""
    if interpreted():
        return kernel
    return triton.autotune(
        [
            triton.Config(
                {name: size for name, size in choice.items() if name.isupper()},
                num_warps=choice["warps"],
                num_stages=choice["stages"],
            )
            for choice in choices
        ],
        key=key,
        prune_configs_by={"early_config_prune": _fitting},
    )(kernel)


# Of an A100, the smaller of those in mind: shared memory of a program, and bytes of accumulators
# and queries that 8 warps hold in registers.
_SHARED = 160 * 1024
_HELD = 64 * 1024


def _fitting(configs: list[Any], named: dict[str, Any], **constants: Any) -> list[Any]:
    width = sum(constants.get(name, 0) for name in ("HEAD_BLOCK", "VALUE_BLOCK", "WIDTH"))
    size = next(iter(named.values())).element_size() * width  # of the kernel's first argument

    def fits(config: Any) -> bool:
        sizes = config.kwargs
        rows, block = sizes.get("ROWS", 16), sizes.get("BLOCK", sizes.get("PANEL"))
        shared = config.num_stages * block * size + rows * size // 2
        few = rows <= max(16, constants.get("MOST_ROWS", rows))
        return few and shared <= _SHARED and rows * size <= _HELD

    return [config for config in configs if fits(config)] or configs[:1]
