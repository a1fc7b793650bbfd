"""Functions that the attention kernels share: attention over a head's slots, tile by tile, with a
streaming softmax.

The streaming softmax is that of FlashAttention (Dao et al. 2022, 2205.14135, Algorithm 1): a
maximum, a total and a weighted sum per query. The total and the sum are rescaled when a tile raises
the maximum. Scores are in units of log 2, since the hardware has exp2.

Keys and values in 8 or 4 bits are multiplied as they are: their codes are exact in float16, and the
scales, which the channels of a group share, are applied to the products. With one copy of the
queries for each group, which is 0 in the channels of the others,

    <q, step * code> = sum over groups g of step_g <q_g, code>

so that a channel of a slot costs a conversion and no arithmetic. For the values, the weights of the
softmax are multiplied by the step of each group. Queries in 16 bits are divided by the largest
element of each, so that they fit into float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.kernels.triton_codes import halves, whole
from kvsketch.kernels.triton_tuning import product

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# A factor of weights times steps, which float16 holds down to 6e-8.
SMALL = tl.constexpr(256.0)


@triton.jit
def log2_of(log_masses: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The base-2 log of masses whose natural one is stored; -inf for dead slots and beyond the
    end."""
    log = tl.load(log_masses, mask=there, other=float("-inf"))
    return tl.where(log <= -1e29, float("-inf"), log * LOG2E)


@triton.jit
def columns(page: tl.tuple, WIDTH: tl.constexpr) -> tl.tensor:
    """The channel of every column of a tile, int64 ``[WIDTH]``, ``dim`` or more where there is
    none. The lower halves of all bytes of 4-bit codes come before the upper ones."""
    column = tl.arange(0, WIDTH).to(tl.int64)
    if page.bits == 4:
        byte = column % (WIDTH // 2)
        channel = column // (WIDTH // 2) * page.bytes + byte
        column = tl.where(byte < page.bytes, channel, page.dim)
    return column


@triton.jit
def attend_slots(
    highest: tl.tensor,
    weight: tl.tensor,
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
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:
    """The streaming softmax of queries ``[rows, columns]`` at the positions ``here`` over the
    slots ``first + begin .. first + end - 1`` of a row: ``highest``, ``weight`` and the weighted
    sum of the values, ``[rows, WIDTH]``. It must be called before any other values are added."""
    ROWS: tl.constexpr = q.shape[0]
    KEY_TILES: tl.constexpr = page.key.tiles
    TILES: tl.constexpr = page.value.tiles
    WIDE: tl.constexpr = q.dtype == tl.float32
    key_columns = columns(page.key, q.shape[1])
    value_columns = columns(page.value, WIDTH)
    constant = None
    if page.key.bits != 0:  # <q, offset + unit x> = <q, offset> + <unit q, x>
        wide = q.to(tl.float32)
        if page.key.offset is not None:
            centre = _offset(page.key, row, head, key_columns)
            constant = tl.sum(wide * centre[None, :], axis=1) * scoring.scaling
        q = wide * _unit(page.key, row, head, key_columns)[None, :]
        peak = tl.max(tl.abs(q), axis=1)
        if not WIDE:
            q = (q / tl.where(peak > 0, peak, 1.0)[:, None]).to(tl.float16)
        apart = tl.where(_own(page.key, key_columns), q[None, :, :], 0.0).to(q.dtype)
        q = tl.reshape(apart, (KEY_TILES * ROWS, q.shape[1]))
        if page.key.bits == 4:
            q, q_upper = _split(q)
    summed = tl.zeros([TILES * ROWS, WIDTH // 2 if page.value.bits == 4 else WIDTH], tl.float32)
    summed_upper = summed
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        there = index < end
        slots = first + index
        if page.key.bits == 4:
            k, upper = _halves(page.key, row, slots, there, key_columns, WIDE)
            scores = product(q_upper, tl.trans(upper), against(q, k, PRECISION), PRECISION)
        else:
            k = _tile(page.key, row, slots, there, key_columns, WIDE)
            scores = against(q, k, PRECISION)
        if page.key.bits != 0:
            step = _scales(page.key, row, slots, there)
            each = tl.reshape(scores, (KEY_TILES, ROWS, BLOCK))
            scores = tl.sum(each * step[:, None, :], axis=0)
            if not WIDE:
                scores *= peak[:, None]
        distance = None
        if slope is not None:
            places = page.positions + row * page.positions_at[0] + slots * page.positions_at[1]
            position = tl.load(places, mask=there, other=0)
            distance = (position[None, :] - here[:, None]).to(tl.float32)
        scores = scored(scores, constant, slope, distance, scoring)
        # One addition applies both the mass and the end of the slots.
        if page.mass is not None:
            masses = page.mass + row * page.mass_at[0] + slots * page.mass_at[1]
            bias = log2_of(masses, there)
        else:
            bias = tl.where(there, 0.0, float("-inf"))
        scores += bias[None, :]
        highest, weight, keep, share = weigh(highest, weight, scores)
        if page.value.bits == 0:
            v = _tile(page.value, row, slots, there, value_columns, WIDE)
            share = share.to(v.dtype)
        else:
            share = share[None, :, :] * _scales(page.value, row, slots, there)[:, None, :]
            if not WIDE:  # which may be too small for float16
                share = (share * SMALL).to(tl.float16)
            share = tl.reshape(share, (TILES * ROWS, BLOCK))
            keep = tl.broadcast_to(keep[None, :], (TILES, ROWS))
            keep = tl.reshape(keep, (TILES * ROWS,))
            if page.value.bits == 4:
                v, upper = _halves(page.value, row, slots, there, value_columns, WIDE)
                summed_upper = product(share, upper, summed_upper * keep[:, None], PRECISION)
            else:
                v = _tile(page.value, row, slots, there, value_columns, WIDE)
        summed = product(share, v, summed * keep[:, None], PRECISION)
    if page.value.bits == 4:
        summed = tl.permute(tl.join(summed, summed_upper), (0, 2, 1))
        summed = tl.reshape(summed, (TILES * ROWS, WIDTH))
    if page.value.bits != 0:
        if not WIDE:
            summed *= 1 / SMALL
        each = tl.reshape(summed, (TILES, ROWS, WIDTH))
        summed = tl.sum(tl.where(_own(page.value, value_columns), each, 0.0), axis=0)
        summed *= _unit(page.value, row, head, value_columns)[None, :]
    return highest, weight, summed


@triton.jit
def against(q: tl.tensor, k: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Products of queries and keys, ``[rows, slots]``, in float32 if their dtypes differ."""
    if q.dtype != k.dtype:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    return product(q, tl.trans(k), None, PRECISION)


@triton.jit
def _split(q: tl.tensor) -> tl.tuple:
    """The left and the right half of the columns."""
    both = tl.reshape(q, (q.shape[0], 2, q.shape[1] // 2))
    return tl.split(tl.permute(both, (0, 2, 1)))


@triton.jit
def _own(page: tl.tuple, channels: tl.tensor) -> tl.tensor:
    """Which channels are of each group, ``[tiles, 1, channels]``."""
    return (channels // page.width)[None, None, :] == tl.arange(0, page.tiles)[:, None, None]


@triton.jit
def _tile(
    page: tl.tuple,
    row: tl.tensor,
    slots: tl.tensor,
    there: tl.tensor,
    channels: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Slots of a row, ``[slots, channels]``, 0 where there is none, or their codes in float16 (in
    float32 if ``WIDE``). All numbers are int64."""
    mask = there[:, None]
    if channels.shape[0] != page.dim:
        mask = mask & (channels < page.dim)[None, :]
    places = page.data + row * page.data_at[0] + slots[:, None] * page.data_at[1]
    tile = tl.load(places + channels[None, :] * page.data_at[2], mask=mask, other=0)
    if page.bits == 8:
        tile = whole(tile, WIDE)
    return tile


@triton.jit
def _halves(
    page: tl.tuple,
    row: tl.tensor,
    slots: tl.tensor,
    there: tl.tensor,
    channels: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tuple:
    """As ``_tile``, for 4 bits: the first half of the columns, and the second."""
    byte = tl.arange(0, channels.shape[0] // 2).to(tl.int64)
    mask = there[:, None]
    if byte.shape[0] != page.bytes:
        mask = mask & (byte < page.bytes)[None, :]
    places = page.data + row * page.data_at[0] + slots[:, None] * page.data_at[1]
    both = tl.load(places + byte[None, :] * page.data_at[2], mask=mask, other=0)
    return halves(both, WIDE)


@triton.jit
def _scales(page: tl.tuple, row: tl.tensor, slots: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Scales of the groups of slots, float32 ``[tiles, slots]``."""
    group = tl.arange(0, page.tiles)
    mask = there[None, :] & (group < page.groups)[:, None]
    steps = page.step + row * page.step_at[0] + slots[None, :] * page.step_at[1]
    step = tl.load(steps + group[:, None] * page.step_at[2], mask=mask, other=0.0)
    return step.to(tl.float32)


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
def scored(
    scores: tl.tensor,
    constant: tl.tensor,
    slope: tl.tensor,
    distance: tl.tensor,
    scoring: tl.tuple,
) -> tl.tensor:
    """Scores in units of log 2 from products of queries and keys, ``[rows, slots]``."""
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
def weigh(highest: tl.tensor, weight: tl.tensor, scores: tl.tensor) -> tl.tuple:
    """The running maximum and total ``[rows]`` after one more tile of scores ``[rows, slots]`` in
    units of log 2 (-inf where a query does not attend), the factor of what was summed before, and
    the weights of the tile."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(highest - shift)
    share = tl.exp2(scores - shift[:, None])
    return higher, weight * keep + tl.sum(share, axis=1), keep, share


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
