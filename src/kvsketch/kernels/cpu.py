"""Attention of a few queries per KV head over parts of a page, by the compiled kernel for CPUs.

All rows, heads of any size and all parts, exact or in few bits, are one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.kernels import native, triton_support
from kvsketch.observed import Observed
from kvsketch.page.part import Part
from kvsketch.page.quantized import Quantized
from kvsketch.page.rows import Rows
from kvsketch.slots import Slots

_KINDS = {torch.float32: 32, torch.bfloat16: 17, torch.float16: 16}
_MOST_CHANNELS = 256
#: With more queries than this per KV head, torch's matrix products are faster.
MOST_QUERIES = 32
# Places in the numbers of a part, see ``Part`` in attention.cpp.
_VALUE_DIM, _SIZES, _BASE, _APPENDED = 19, 38, 41, 43
_THREADS = native.CALL - 1  # in those of a call

Numbers = ctypes.Array[ctypes.c_int64]
_Found = tuple[int, Numbers, int] | None


def attend(
    asked: Observed,
    parts: Sequence[Part],
    padded: bool = False,
    newest: int = 1,
    last: Tensor | None = None,
    totals: bool = False,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Attention over all parts together.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]``.
        parts: the slots.
        padded: whether a query that sees no live slot gets zeros.
        newest: q, if the last part ends with the queries' own tokens, of which none sees later
            ones; 1: every query sees all slots.
        last: the newest position of each row, float32 ``[batch]``, if there are slopes.
        totals: whether the logs of the summed weights are wanted.
        rows: which rows of the parts the queries ask; None: each its own.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries, and the logs of
        the summed weights, float32 ``[batch, num_attention_heads, q]``. None: the kernel cannot
        read the slots, or not faster than torch.
    """
    library, queries = native.library(), asked.queries
    each = queries.shape[1] // parts[0].heads * queries.shape[2]
    if library is None or each > MOST_QUERIES or not takes(queries):
        return None
    described = addresses(parts, rows)
    if described is None:
        return None
    places, value_dim, kept = described
    shape = queries.shape[:3]
    logs = torch.empty(shape, dtype=torch.float32, device="cpu") if totals else None
    of_heads = [_of_heads(t, asked, newest) for t in (asked.sinks, asked.slopes)]
    last = None if last is None else last.float().contiguous()
    columns = [*of_heads, last, logs]
    call = _call(places, queries, parts[0].heads, newest, rows, columns, padded)
    out = _launched(library, call, asked, (*shape, value_dim))
    del kept
    return out, logs


def _launched(
    library: ctypes.CDLL, call: Numbers, asked: Observed, shape: tuple[int, ...]
) -> Tensor:
    """The result, of this shape."""
    queries = asked.queries if asked.queries.is_contiguous() else asked.queries.contiguous()
    out = queries.new_empty(shape)
    wrong = library.kvsketch_attend(
        call, queries.data_ptr(), out.data_ptr(), asked.scaling, asked.softcap or 0.0
    )
    assert not wrong
    return out


class Prepared:
    """``attend`` of one query per head, over parts whose tensors stay and whose last one grows."""

    def __init__(self, asked: Observed, parts: Sequence[Part], padded: bool) -> None:
        self._library, self._last, self._like = native.library(), parts[-1], asked.sinks
        self._dtype = asked.queries.dtype
        self._usable = takes(asked.queries) and asked.slopes is None
        found = addresses(parts) if self._usable else None
        self._usable = found is not None
        if found is None:
            return
        places, value_dim, held = found
        self._held = places, [part.for_kernel for part in parts]
        self._numbers = held[-1]
        self._sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
        columns = [self._sinks, None, None, None]
        self._call = _call(places, asked.queries, parts[0].heads, 1, None, columns, padded)
        self._shape = (*asked.queries.shape[:3], value_dim)

    def attend(self, asked: Observed) -> Tensor | None:
        """As the function; the queries have the shape of the first ones, and no gradients. None
        also for what is not like the first ones."""
        library = native.library()
        same = asked.sinks is self._like and library is self._library
        if library is None or not self._usable or not same or asked.queries.dtype != self._dtype:
            return None
        self._numbers[_APPENDED] = self._last.appended
        self._call[_THREADS] = torch.get_num_threads()
        return _launched(library, self._call, asked, self._shape)


def receive(asked: Observed, parts: Sequence[Part], weights: Tensor) -> bool:
    """Raise the scores of all slots to the attention that the slots receive from queries, where it
    is larger.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]`` without ALiBi.
        parts: the slots, which have scores.
        weights: of the queries, float32 ``[q]``, the first one for all queries after all slots; the
            query heads of a KV head are summed.

    Returns:
        Whether it was done; False: the kernel cannot do it.
    """
    library, queries = native.library(), asked.queries
    if library is None or not takes(queries):
        return False
    described = addresses(parts)
    if described is None or any("score" not in part.fields for part in parts):
        return False
    queries, weights = queries.contiguous(), weights.float().contiguous()
    newest = 1 if asked.after else queries.shape[2]
    columns = [_of_heads(asked.sinks, asked, newest), None, None, None]
    call = _call(described[0], queries, parts[0].heads, newest, None, columns, False)
    call[_THREADS] = native.threads()
    wrong = library.kvsketch_receive(
        call, queries.data_ptr(), weights.data_ptr(), asked.scaling, asked.softcap or 0.0
    )
    assert not wrong
    return True


def received(slots: Slots, asked: Observed, weights: Tensor) -> Tensor | None:
    """The attention that slots receive from queries, summed over queries, times ``weights``, and
    over the query heads of a KV head.

    Args:
        slots: ``[batch, num_key_value_heads, n, ...]``.
        asked: queries ``[batch, num_attention_heads, q, head_dim]`` without padding.
        weights: float32 ``[q]``; queries after all slots have the same.

    Returns:
        float32 ``[batch, num_key_value_heads, n]``. None: the kernel cannot do it.
    """
    if not takes(asked.queries) or asked.live is not None or asked.slopes is not None:
        return None
    keys = slots.keys.contiguous()
    score = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    part = Part.of_tokens(Slots(keys, keys, slots.mass, score=score))  # no value is read
    return score if receive(asked, [part], weights) else None


def takes(queries: Tensor) -> bool:
    """Whether the kernel is used and reads these queries."""
    if native.library() is None or queries.device.type != "cpu" or queries.dtype not in _KINDS:
        return False
    if triton_support.chosen(queries):  # in its interpreter
        return False
    return not (queries.requires_grad and torch.is_grad_enabled())


def _of_heads(numbers: Tensor | None, asked: Observed, newest: int) -> Tensor | None:
    """Numbers of query heads as the kernel reads them: with ``newest`` 1, one of every query."""
    if numbers is None:
        return None
    numbers = numbers.float().contiguous()
    return numbers if newest > 1 else numbers.repeat_interleave(asked.queries.shape[2])


def addresses(
    parts: Sequence[Part], rows: Rows | None = None
) -> tuple[Numbers, int, list[Numbers]] | None:
    """The addresses of the parts' numbers, the channels of a value, and the numbers, which must
    stay in memory as long as the addresses are used. None: the kernel cannot read the parts."""
    places, kept = [], []
    for part in parts:
        found = _numbers(part)
        if found is None:
            return None
        place, numbers, value_dim = found
        numbers[_BASE], numbers[_APPENDED] = part.base, part.appended
        if rows is not None:  # of any number: what all pages share is read of the first
            numbers = (ctypes.c_int64 * native.PART)(*numbers)
            numbers[_SIZES - 1] = numbers[_SIZES + 1] = 0
            if part is parts[-1]:
                numbers[_SIZES : _SIZES + 3] = [rows.reads.data_ptr(), 1, 0]
            place = ctypes.addressof(numbers)
        places.append(place)
        kept.append(numbers)
    return (ctypes.c_int64 * len(places))(*places), value_dim, kept


def _call(
    places: Numbers,
    queries: Tensor,
    kv_heads: int,
    newest: int,
    rows: Rows | None,
    columns: Sequence[Tensor | None],
    padded: bool,
) -> Numbers:
    """``Call`` of attention.cpp. ``columns``: sinks, slopes, newest positions, logs of totals."""
    batch, heads, q, _ = queries.shape
    return (ctypes.c_int64 * native.CALL)(
        ctypes.addressof(places),
        len(places),
        batch,
        kv_heads,
        heads // kv_heads * q,
        newest,
        _KINDS[queries.dtype],
        0 if rows is None else rows.pages.data_ptr(),
        *(0 if t is None else t.data_ptr() for t in columns),
        padded,
        torch.get_num_threads(),
    )


def _numbers(part: Part) -> _Found:
    """What the kernel has to know of a part, in the order of ``Part`` in attention.cpp, its address
    before it and the channels of a value after it; None: the kernel cannot read the part. It is
    kept with the part as long as the part has the same tensors."""
    fields, packed, blocks = part.fields, part.packed, part.blocks
    keys = packed["keys"] if packed else fields["keys"]
    values = packed["values"] if packed else fields["values"]
    mass, positions, score = (fields.get(n) for n in ("log_mass", "positions", "score"))
    held = part.for_kernel
    found: _Found = None
    if held is not None:
        of, found = held
        if (
            of[0] is keys
            and of[1] is values
            and of[2] is mass
            and of[3] is positions
            and of[4] is score
            and of[5] is part.sizes
            and of[6] is blocks
        ):
            return found
    numbers = _describe(part, keys, values, mass, positions, score)
    found = None
    if numbers is not None:
        found = ctypes.addressof(numbers), numbers, numbers[_VALUE_DIM]
    part.for_kernel = (keys, values, mass, positions, score, part.sizes, blocks), found
    return found


def _describe(
    part: Part,
    keys: Tensor | Quantized,
    values: Tensor | Quantized,
    mass: Tensor | None,
    positions: Tensor | None,
    score: Tensor | None,
) -> Numbers | None:
    even = part.blocks is None
    sides = [_side(keys, even), _side(values, even)]
    lead = keys.codes if isinstance(keys, Quantized) else keys
    other = values.codes if isinstance(values, Quantized) else values
    start, sizes = [0, 0], [0, 0, 0]
    capacity = _heads(lead) if even else 0
    columns = [_column(column, even, capacity) for column in (mass, positions, score)]
    if None in sides or None in columns or (even and _heads(other) != capacity):
        return None
    if part.layout is not None:
        assert part.sizes is not None
        places = part.layout.start
        if places.device.type != "cpu" or part.sizes.device.type != "cpu" or places.stride(1) != 1:
            return None
        start = [places.data_ptr(), places.stride(0)]
        sizes = [part.sizes.data_ptr(), *part.sizes.stride()]
    flat = [number for some in (*sides, *columns) for number in some or ()]
    return (ctypes.c_int64 * native.PART)(*flat, *start, *sizes, part.base, capacity, 0)


def _side(side: Tensor | Quantized, even: bool) -> list[int] | None:
    """Keys or values; None: the kernel cannot read them."""
    if isinstance(side, Tensor):
        kind = _KINDS.get(side.dtype)
        if kind is None or side.device.type != "cpu" or not _fits(side, even):
            return None
        if side.shape[-1] > _MOST_CHANNELS or side.requires_grad:
            return None
        size, slot = side.element_size(), side.stride(-2)
        return [
            side.data_ptr(),
            side.stride(0) * size,
            slot * size,
            kind,
            side.shape[-1],
            *[0] * 10,
        ]
    codes, step, unit, offset = side.codes, side.step, side.unit, side.offset
    if side.channels > _MOST_CHANNELS or codes.device.type != "cpu" or not _fits(codes, even):
        return None
    groups = step.shape[-1]
    if step.stride(-2) != groups or not _fits(step, even):
        return None
    if even and _heads(step) != _heads(codes):
        return None
    if unit.stride(-1) != 1 or (offset is not None and offset.stride(-1) != 1):
        return None
    return [
        codes.data_ptr(),
        codes.stride(0),
        codes.stride(-2),
        side.bits,
        side.dim,
        step.data_ptr(),
        step.stride(0),
        groups,
        side.channels // groups,
        *_per_channel(unit),
        *_per_channel(offset),
    ]


def _per_channel(tensor: Tensor | None) -> list[int]:
    return [0, 0, 0] if tensor is None else [tensor.data_ptr(), *tensor.stride()[:2]]


def _column(column: Tensor | None, even: bool, capacity: int) -> list[int] | None:
    if column is None:
        return [0, 0]
    if column.dtype != torch.float32 or column.device.type != "cpu" or column.stride(-1) != 1:
        return None
    if even and _heads(column.unsqueeze(-1)) != capacity:
        return None
    return [column.data_ptr(), column.stride(0)]


def _heads(tensor: Tensor) -> int:
    """From one head of equal size to the next, in slots."""
    return tensor.stride(1) // max(1, tensor.stride(2)) if tensor.shape[1] > 1 else 0


def _fits(tensor: Tensor, even: bool) -> bool:
    """Whether channels are side by side, and heads a whole number of slots apart."""
    if tensor.stride(-1) != 1:
        return False
    return not even or tensor.shape[1] == 1 or tensor.stride(1) % max(1, tensor.stride(2)) == 0
