"""Functions that the attention kernels share: attention over a head's slots, tile by tile, with a
streaming softmax.

The streaming softmax is that of FlashAttention (Dao et al. 2022, 2205.14135, Algorithm 1): a
maximum, a total and a weighted sum per query. The total and the sum are rescaled when a tile raises
the maximum. Scores are in units of log 2, since the hardware has exp2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.kernels.flat_page import FlatQuantized, Page
from kvsketch.kernels.triton_tuning import product

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Stored(NamedTuple):
    """Keys or values of a flat page as kernel arguments: tensors and their strides (``at``)."""

    data: Tensor
    data_at: tuple[int, ...]
    low: Tensor | None
    low_at: tuple[int, ...]
    step: Tensor | None
    step_at: tuple[int, ...]
    unit: Tensor | None
    unit_at: tuple[int, ...]
    offset: Tensor | None
    offset_at: tuple[int, ...]
    dim: tl.constexpr
    bits: tl.constexpr  # 0: not quantised
    width: tl.constexpr
    bytes: tl.constexpr
    groups: tl.constexpr


class Flat(NamedTuple):
    """A flat page, and which slots belong to which head."""

    key: Stored  # not "keys" and "values": Triton uses the latter for the elements of a tuple
    value: Stored
    mass: Tensor | None
    mass_at: tuple[int, ...]
    positions: Tensor | None
    positions_at: tuple[int, ...]
    starts: Tensor
    starts_at: tuple[int, ...]
    counts: Tensor
    counts_at: tuple[int, ...]
    total: int
    rows: Tensor | None
    rows_at: tuple[int, ...]


class New(NamedTuple):
    """The new tokens as kernel arguments: tensors and their strides (``at``)."""

    key: Tensor
    key_at: tuple[int, ...]
    value: Tensor
    value_at: tuple[int, ...]
    mass: Tensor | None
    mass_at: tuple[int, ...]
    positions: Tensor | None
    positions_at: tuple[int, ...]


class KernelScores(NamedTuple):
    """The parameters that turn inner products into scores."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    sinks_at: tuple[int, ...]
    slopes: Tensor | None
    slopes_at: tuple[int, ...]


def stored(page: Page) -> Stored:
    """``page`` as arguments of a launch."""
    codes = page.codes if isinstance(page, FlatQuantized) else page
    quantised: tuple[Any, ...]
    if isinstance(page, FlatQuantized):
        unit_at = at(page.unit)
        if page.unit.shape[3] == 1:  # the same for all channels
            unit_at = (*unit_at[:3], 0)
        quantised = (page.low, at(page.low), page.step, at(page.step), page.unit, unit_at)
        quantised += (page.offset, at(page.offset))
        layout = (page.dim, page.bits, page.width, codes.shape[2], page.low.shape[2])
    else:
        quantised, layout = (None, (0,)) * 4, (codes.shape[2], 0, 1, 1, 1)
    return Stored(codes, at(codes), *quantised, *map(tl.constexpr, layout))


def flat(
    keys: Page,
    values: Page,
    log_mass: Tensor | None,
    positions: Tensor | None,
    start: Tensor,
    count: Tensor,
    pages: Tensor | None = None,
) -> Flat:
    """A flat page as arguments of a launch."""
    return Flat(
        stored(keys),
        stored(values),
        log_mass,
        at(log_mass),
        positions,
        at(positions),
        start,
        at(start),
        count,
        at(count),
        keys.shape[1],
        pages,
        at(pages),
    )


def at(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides of a tensor; none for None."""
    return (0,) if tensor is None else tuple(tensor.stride())


def kind(*pages: Page) -> str:
    """The dtypes or bits of pages, on which the speed of a kernel depends besides sizes."""
    return " ".join(
        f"{page.bits} bits" if isinstance(page, FlatQuantized) else str(page.dtype)
        for page in pages
    )


@triton.jit
def log2_of(log_masses: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The base-2 log of masses whose natural one is stored; -inf for dead slots and beyond the
    end."""
    log = tl.load(log_masses, mask=there, other=float("-inf"))
    return tl.where(log <= -1e29, float("-inf"), log * LOG2E)


@triton.jit
def attend_slots(
    highest: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    q: tl.tensor,
    page: tl.tuple,
    scoring: tl.tuple,
    slope: tl.tensor,
    here: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:
    """The streaming softmax of queries ``[rows, channels]`` at the positions ``here`` over the
    slots ``first + begin .. first + end - 1`` of a row. It must be called before
    any other values are added."""
    head_channels = tl.arange(0, q.shape[1]).to(tl.int64)
    value_channels = tl.arange(0, summed.shape[1]).to(tl.int64)
    constant = None
    if page.key.bits != 0:  # <q, offset + unit x> = <q, offset> + <unit q, x>
        wide = q.to(tl.float32)
        if page.key.offset is not None:
            centre = _offset(page.key, row, head, head_channels)
            constant = tl.sum(wide * centre[None, :], axis=1) * scoring.scaling
        q = (wide * _unit(page.key, row, head, head_channels)[None, :]).to(q.dtype)
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        there = index < end
        slots = first + index
        k = _tile(page.key, row, slots, there, head_channels)
        if page.key.bits != 0:
            k = k.to(q.dtype)
        distance = None
        if slope is not None:
            places = page.positions + row * page.positions_at[0] + slots * page.positions_at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = score(q, k, constant, slope, distance, scoring, PRECISION)
        # One addition applies both the mass and the end of the slots.
        if page.mass is not None:
            masses = page.mass + row * page.mass_at[0] + slots * page.mass_at[1]
            bias = log2_of(masses, there)
        else:
            bias = tl.where(there, 0.0, float("-inf"))
        scores += bias[None, :]
        v = _tile(page.value, row, slots, there, value_channels)
        if page.value.bits != 0:
            v = v.to(q.dtype)
        highest, weight, summed = absorb(highest, weight, summed, scores, v, PRECISION)
    if page.value.bits != 0:
        summed *= _unit(page.value, row, head, value_channels)[None, :]
    return highest, weight, summed


@triton.jit
def _tile(
    page: tl.tuple, row: tl.tensor, slots: tl.tensor, there: tl.tensor, channels: tl.tensor
) -> tl.tensor:
    """Slots of a row, ``[slots, channels]``, 0 where there is none. All numbers are int64.

    A page in 8 or 4 bits is returned as ``low + step * code`` in float32, because its unit and
    offset are applied once per query instead of once per slot."""
    mask = there[:, None]
    if channels.shape[0] != page.dim:
        mask = mask & (channels < page.dim)[None, :]
    places = page.data + row * page.data_at[0] + slots[:, None] * page.data_at[1]
    if page.bits == 0:
        tile = tl.load(places + channels[None, :] * page.data_at[2], mask=mask, other=0.0)
    else:
        byte = (channels % page.bytes)[None, :]
        code = tl.load(places + byte * page.data_at[2], mask=mask, other=0)
        if page.bits == 4:
            code = (code >> (channels // page.bytes * 4)[None, :].to(tl.uint8)) & 15
        # The zero points and scales of a slot's groups are loaded, and each channel picks its own.
        lows = page.low + row * page.low_at[0] + slots * page.low_at[1]
        steps = page.step + row * page.step_at[0] + slots * page.step_at[1]
        low = tl.load(lows, mask=there, other=0.0)[:, None]
        step = tl.load(steps, mask=there, other=0.0)[:, None]
        for i in tl.static_range(1, page.groups):
            lows += page.low_at[2]
            steps += page.step_at[2]
            mine = (channels // page.width == i)[None, :]
            low = tl.where(mine, tl.load(lows, mask=there, other=0.0)[:, None], low)
            step = tl.where(mine, tl.load(steps, mask=there, other=0.0)[:, None], step)
        tile = code.to(tl.float32) * step.to(tl.float32) + low.to(tl.float32)
    return tile


@triton.jit
def _unit(page: tl.tuple, row: tl.tensor, head: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """The unit of each channel of a quantised page in one head."""
    places = page.unit + row * page.unit_at[0] + head * page.unit_at[1]
    return tl.load(places + channels * page.unit_at[3], mask=channels < page.dim, other=0.0)


@triton.jit
def _offset(page: tl.tuple, row: tl.tensor, head: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """The centre of each channel of a quantised page in one head."""
    places = page.offset + row * page.offset_at[0] + head * page.offset_at[1]
    return tl.load(places + channels * page.offset_at[3], mask=channels < page.dim, other=0.0)


@triton.jit
def score(
    q: tl.tensor,
    k: tl.tensor,
    constant: tl.tensor,
    slope: tl.tensor,
    distance: tl.tensor,
    scoring: tl.tuple,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Scores of queries ``[rows, channels]`` and keys ``[slots, channels]`` in units of log 2."""
    if q.dtype == k.dtype:
        scores = product(q, tl.trans(k), None, PRECISION)
    else:
        scores = product(q.to(tl.float32), tl.trans(k.to(tl.float32)), None, PRECISION)
    scores = scores * scoring.scaling
    if constant is not None:
        scores += constant[:, None]
    if scoring.softcap is not None:
        scores = _capped(scores, scoring.softcap)
    if slope is not None:
        scores += slope[:, None] * distance
    return scores * LOG2E


@triton.jit
def _capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """``softcap * tanh(scores / softcap)``, computed from exp, which may be infinite. Near 0, where
    exp would lose digits, the series of tanh is used."""
    x = scores / softcap
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    far = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    return softcap * tl.where(square < 0.01, near, far)


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
    one more tile of scores ``[rows, slots]`` in units of log 2 (-inf where a query does not attend)
    and values ``[slots, value channels]``."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(highest - shift)
    share = tl.exp2(scores - shift[:, None])
    weight = weight * keep + tl.sum(share, axis=1)
    summed = product(share.to(v.dtype), v, summed * keep[:, None], PRECISION)
    return higher, weight, summed


@triton.jit
def place(page: tl.tuple, row: tl.tensor) -> tl.tensor:
    """The row of the page's tensors that has the slots of a row of queries."""
    if page.rows is not None:
        row = tl.load(page.rows + row * page.rows_at[0]).to(tl.int64)
    return row


@triton.jit
def owned(page: tl.tuple, row: tl.tensor, head: tl.tensor) -> tl.tuple:
    """A head's first slot, its number of slots, and whether some of them are not in the page (the
    number is then 0)."""
    start = page.starts + row * page.starts_at[0] + head * page.starts_at[1]
    count = page.counts + row * page.counts_at[0] + head * page.counts_at[1]
    first, number = tl.load(start).to(tl.int64), tl.load(count).to(tl.int64)
    wrong = (first < 0) | (number < 0) | (number > page.total - first)
    return first, tl.where(wrong, 0, number).to(tl.int32), wrong


@triton.jit
def finished(
    highest: tl.tensor, weight: tl.tensor, summed: tl.tensor, wrong: tl.tensor
) -> tl.tuple:
    """The mean of the values, and the natural logarithm of the total. They are 0 and -inf where the
    total is 0, and NaN where the slots are not in the page."""
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    nothing = weight == 0  # not "weight > 0": a NaN must stay a NaN
    mean = tl.where(nothing[:, None], 0.0, summed / tl.where(nothing, 1.0, weight)[:, None])
    log = (shift + tl.log2(tl.where(nothing, 1.0, weight))) * LN2
    log = tl.where(nothing, float("-inf"), log)
    return tl.where(wrong, float("nan"), mean), tl.where(wrong, float("nan"), log)
