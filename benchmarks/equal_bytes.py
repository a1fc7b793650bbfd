"""The same bytes for every method: how bytes are counted, and how many slots fit into them.

What attention needs is counted, per KV head: keys and values at 2 bytes a number (bfloat16), masses
at 4 where a method has them, slots in 8 or 4 bits with their scales, zero points and units as they
are stored. Of a streaming sketch its whole state is counted: attention reads nothing else, and
keys and values in it take 2 bytes a number, all else what it takes. Scores and waiting queries
serve further compressions only and are not counted.

``kept`` is a share of the bytes of the tokens between sinks and recent window: a method may use as
many bytes as one that keeps the share ``kept`` of these tokens unchanged. Its number of slots
depends on the bytes of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.measuring import parts_of
from kvsketch import SketchCache, Slots
from kvsketch.cache import Stream
from kvsketch.cache.quantized import predicted_bytes, slot_bytes
from kvsketch.cache.storage import FULL, Bits
from kvsketch.evaluation.runner.allocation import Curves
from kvsketch.methods.sketches import Sketch

# Runs to come near the bytes allowed, and to get below them at all.
_TRIES, _MOST_TRIES = 3, 10
# Tensors of a sketch that have the model's dtype.
_MODEL = (".keys", ".values", "reservoir")


@dataclass(frozen=True)
class Held:
    """What a run returned.

    Attributes:
        what: slots or a cache.
        bytes: held per KV head.
        slot: bytes that one slot more in the budget would cost.
        token: bytes of one token kept unchanged.
    """

    what: Any
    bytes: float
    slot: float
    token: float


def plain_bytes(slots: Slots) -> int:
    """Bytes of one token, kept unchanged."""
    return 2 * (slots.keys.shape[-1] + slots.values.shape[-1])


def held_bytes(slots: Slots, bits: Bits = FULL, sink: int = 0, recent: int = 0) -> float:
    """Bytes per KV head. ``bits``: of the slots between ``sink`` and ``recent``."""
    columns = int(slots.mass is not None)
    if bits == FULL:
        live = slots.live()
        count = slots.count if live is None else float(live.sum(-1).double().mean())
        return count * (plain_bytes(slots) + 4 * columns)
    middle = max(0, slots.count - sink - recent)
    widths = slots.keys.shape[-1], slots.values.shape[-1]
    return predicted_bytes(middle, slots.count - middle, *widths, bits, itemsize=2, columns=columns)


def held(
    what: Any,
    parts: list[Slots],
    bits: Sequence[Bits] = (),
    sink: int = 0,
    recent: int = 0,
    reducers: Sequence[Any] = (),
) -> Held:
    """``what`` holds ``parts``: the mean over all their heads. ``bits``: of each of them; none: as
    given. ``reducers``: what made each of them, if that may be a sketch."""
    heads = [part.keys.shape[1] for part in parts]

    def mean(values: Iterable[float]) -> float:
        return sum(n * x for n, x in zip(heads, values, strict=True)) / sum(heads)

    sketches = [getattr(reducer, "sketch", None) for reducer in reducers] or [None] * len(parts)
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
    """Bytes per KV head of a sketch and the exact tokens before and behind it; ``slots``: all."""
    return state_bytes(sketch) + (slots.count - sketch.slots.count) * plain_bytes(slots)


def state_bytes(sketch: Sketch) -> float:
    """Bytes of a sketch's state per KV head."""
    layout = sketch.meta["token"]
    size = sum(
        2 * t.numel() if name.endswith(_MODEL) else t.nbytes for name, t in sketch.state.items()
    )
    return size / (layout["batch"] * layout["heads"])


def held_by(cache: SketchCache, sink: int, recent: int) -> Held:
    """What the layers that a cache compresses hold of a prompt just read."""
    return held_in(cache, [x.stream for x in cache.layers if hasattr(x, "stream")], sink, recent)


def held_in(
    what: Any, streams: Sequence[Stream], sink: int, recent: int, bits: Sequence[Bits] = ()
) -> Held:
    """What layers hold; ``bits``: of each of them, if not those it has."""
    own = bits or [stream.bits for stream in streams]
    parts = [(*p, b) for s, b in zip(streams, own, strict=True) for p in parts_of(s)]
    slots, reducers, bits = (list(column) for column in zip(*parts, strict=True))
    return held(what, slots, bits, sink, recent, reducers)


def of_budget(found: Held, budget: int) -> Held:
    """What a budget bought whose slots are what that many would cost in the model's dtype: a slot
    more of it costs what the others did."""
    return replace(found, slot=found.bytes / budget)


def _slot(slots: Slots, bits: Bits) -> float:
    widths = (slots.keys.shape[-1], slots.values.shape[-1])
    keys_and_values = 2 * sum(widths) if bits == FULL else sum(map(slot_bytes, widths, bits))
    return keys_and_values + 4 * (slots.mass is not None)


@dataclass
class Fit:
    """Finds the number of slots that takes the bytes allowed; remembers from one prompt to the next
    how it compares with the number of plain tokens."""

    ratio: float = field(default=1.0, init=False)

    def __call__(
        self, run: Callable[[int], Held], tokens: int, least: int, most: int
    ) -> tuple[int, Held] | None:
        """The budget and result of ``run(budget)`` that holds most of the bytes allowed, but not
        more; None if nothing tried holds so few.

        Args:
            tokens: how many a method that keeps them as they are would keep.
            least: smallest budget that makes sense.
            most: largest.
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
    """The schedule for a kept fraction of the tokens; below the least measured, that one's."""
    return curves.allocate(min(1.0, max(fraction, float(curves.kept[0]))))
