"""The same bytes for every method: how bytes are counted, and how many slots fit into them.

Everything that attention reads is counted, per KV head: keys and values at 2 bytes a number
(bfloat16), masses at 4 bytes if a method has them, and slots in 8 or 4 bits with their scales
and units as they are stored. A streaming sketch is counted with its whole state, in which keys and
values take 2 bytes a number and everything else the bytes of its dtype. Scores, and queries kept
for the next compression, are not counted, because attention does not need them.

``kept`` is a share of the bytes of the tokens between sinks and recent window: a method may use as
many bytes as one that keeps the share ``kept`` of these tokens unchanged. Its number of slots
depends on the bytes of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.measuring import parts_of, sketch_of
from kvsketch import SketchCache, Slots
from kvsketch.cache import Stream
from kvsketch.cache.curves import Curves
from kvsketch.methods.sketches import Sketch
from kvsketch.page.quantized import FULL, Bits, check_bits, slot_bytes

#: Bytes of a number of a key or value: those of a model in 16 bits, whatever computes it.
ITEMSIZE = 2
# The number of runs to come close to the bytes allowed, and to find a budget that fits at all.
_TRIES, _MOST_TRIES = 3, 10
# Name endings of the tensors in a sketch's state that have the model's dtype.
_MODEL = (".keys", ".values", "reservoir")


@dataclass(frozen=True)
class Held:
    """The result of a run, with its bytes.

    Attributes:
        what: slots or a cache.
        bytes: bytes per KV head.
        slot: bytes that one more slot in the budget would cost.
        token: bytes of one token kept unchanged.
    """

    what: Any
    bytes: float
    slot: float
    token: float


def plain_bytes(slots: Slots) -> int:
    """Bytes of one token that is kept unchanged."""
    return ITEMSIZE * (slots.keys.shape[-1] + slots.values.shape[-1])


def predicted_bytes(
    quantised: int,
    full: int,
    head_dim: int,
    value_dim: int,
    bits: int | tuple[int, int],
    *,
    heads: int = 1,
    itemsize: int = 4,
    columns: int = 0,
) -> int:
    """Bytes of one layer's slots, for all its KV heads.

    Args:
        quantised: slots per head in ``bits``: all but sinks, recent window and buffer.
        full: slots per head in the model's dtype, including allocated but unused memory.
        bits: of keys and values, or of keys and of values.
        heads: the number of batch rows times KV heads.
        itemsize: bytes of an element in the model's dtype.
        columns: the number of columns among mass, positions and score (4 bytes per slot each).

    Centres and units (``8 * head_dim + 4`` per head) are counted.
    """
    keys, values = map(check_bits, bits if isinstance(bits, tuple) else (bits, bits))
    if keys == values == 16:
        full, quantised, grid = full + quantised, 0, 0
    else:
        grid = 8 * head_dim + 4
    small = slot_bytes(head_dim, keys) + slot_bytes(value_dim, values) if quantised else 0
    slots = quantised * small + full * (head_dim + value_dim) * itemsize
    return heads * (slots + 4 * columns * (quantised + full) + (grid if quantised else 0))


def held_bytes(slots: Slots, bits: Bits = FULL, sink: int = 0, recent: int = 0) -> float:
    """Bytes per KV head. ``bits`` are those of the slots between ``sink`` and ``recent``."""
    columns = int(slots.mass is not None)
    if bits == FULL:
        live = slots.live()
        count = slots.count if live is None else float(live.sum(-1).double().mean())
        return count * (plain_bytes(slots) + 4 * columns)
    middle = max(0, slots.count - sink - recent)
    widths = slots.keys.shape[-1], slots.values.shape[-1]
    return predicted_bytes(
        middle, slots.count - middle, *widths, bits, itemsize=ITEMSIZE, columns=columns
    )


def held(
    what: Any,
    parts: list[Slots],
    bits: Sequence[Bits] = (),
    sink: int = 0,
    recent: int = 0,
    reducers: Sequence[Any] = (),
) -> Held:
    """``what`` with its bytes per KV head, the mean over all heads of its ``parts``.

    Args:
        bits: the bits of each part. Without them, parts are counted as 16-bit slots.
        reducers: the method that compressed each part. A sketch is counted with its whole state.
    """
    heads = [part.keys.shape[1] for part in parts]

    def mean(values: Iterable[float]) -> float:
        return sum(n * x for n, x in zip(heads, values, strict=True)) / sum(heads)

    sketches = [sketch_of(reducer) for reducer in reducers] or [None] * len(parts)
    stored = bits or [FULL] * len(parts)
    every = list(zip(parts, stored, sketches, strict=True))
    return Held(
        what,
        mean(
            held_bytes(part, own, sink, recent) if sketch is None else around(sketch, part)
            for part, own, sketch in every
        ),
        mean(_slot(part, own) for part, own, _ in every),
        mean(plain_bytes(part) for part in parts),
    )


def around(sketch: Sketch, slots: Slots) -> float:
    """Bytes per KV head of a sketch and the exact tokens around it. ``slots`` contain both."""
    return state_bytes(sketch) + (slots.count - sketch.slots.count) * plain_bytes(slots)


def state_bytes(sketch: Sketch) -> float:
    """Bytes of a sketch's state per KV head."""
    layout = sketch.meta["token"]
    size = sum(
        2 * t.numel() if name.endswith(_MODEL) else t.nbytes for name, t in sketch.state.items()
    )
    return size / (layout["batch"] * layout["heads"])


def held_by(cache: SketchCache, sink: int, recent: int) -> Held:
    """The bytes of a cache that has just read a prompt, over the layers that it compresses."""
    return held_in(cache, [x.stream for x in cache.layers if hasattr(x, "stream")], sink, recent)


def held_in(
    what: Any, streams: Sequence[Stream], sink: int, recent: int, bits: Sequence[Bits] = ()
) -> Held:
    """The bytes of ``streams``. ``bits`` are those of each layer, by default the stream's own."""
    own = bits or [stream.pace.bits for stream in streams]
    parts = [(*p, b) for s, b in zip(streams, own, strict=True) for p in parts_of(s)]
    slots, reducers, bits = (list(column) for column in zip(*parts, strict=True))
    recent = min(recent, *(stream.around[1] for stream in streams))  # fewer beside few bits
    return held(what, slots, bits, sink, recent, reducers)


def of_budget(found: Held, budget: int) -> Held:
    """``found``, with the bytes per slot of a budget that counts slots in the model's dtype. One
    more slot in the budget then costs as many bytes as the others on average."""
    return replace(found, slot=found.bytes / budget)


def _slot(slots: Slots, bits: Bits) -> float:
    widths = (slots.keys.shape[-1], slots.values.shape[-1])
    keys_and_values = ITEMSIZE * sum(widths) if bits == FULL else sum(map(slot_bytes, widths, bits))
    return keys_and_values + 4 * (slots.mass is not None)


@dataclass
class Fit:
    """Finds the number of slots that takes the bytes allowed. The ratio of this number to that of
    plain tokens is the first guess for the next prompt."""

    ratio: float = field(default=1.0, init=False)

    def __call__(
        self, run: Callable[[int], Held], tokens: int, least: int, most: int
    ) -> tuple[int, Held] | None:
        """The budget, and the result of ``run(budget)``, with the most bytes among those tried that
        do not exceed the bytes allowed. None if every result exceeds them.

        Args:
            tokens: the bytes allowed, as a number of tokens that are kept unchanged.
            least: the smallest budget that makes sense.
            most: the largest budget.
        """
        fitting: dict[int, Held] = {}
        tried: set[int] = set()
        budget = min(most, max(least, round(self.ratio * tokens)))
        while budget not in tried and len(tried) < (_TRIES if fitting else _MOST_TRIES):
            tried.add(budget)
            found = run(budget)
            spare = tokens * found.token - found.bytes
            if spare >= -1e-6:
                fitting[budget] = found
            more = math.floor(spare / found.slot + 1e-9)
            budget = min(most, max(least, budget + more))
        if not fitting:
            return None
        best = max(fitting, key=lambda b: fitting[b].bytes)
        self.ratio = best / tokens
        return best, fitting[best]


def shares(curves: Curves, fraction: float) -> list[list[float]]:
    """The schedule for a kept fraction, or for the smallest measured one if that is larger."""
    return curves.allocate(min(1.0, max(fraction, float(curves.kept[0]))))
