"""Layers that are compressed to a budget as in a ``SketchCache``, but without a model."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch import Observed, Slots
from kvsketch.budget import Budget, Schedule
from kvsketch.cache import Plan, Stream, windowed
from kvsketch.cache.storage import CHOICES, FULL, MEASURED


def waiting(slots: Slots, seen: Observed, method: str, sink: int = 4, recent: int = 32) -> Stream:
    """A layer that has its prompt and waits for a budget: ``kvsketch.cache.measure`` finds the
    errors its heads' budgets follow from."""
    stream = Stream(windowed(method, sink, recent), None)
    stream.extend(slots)
    stream.settle(seen, prefill=True)
    return stream


def planned(
    layers: Sequence[tuple[Slots, Observed]],
    method: str,
    budget: int,
    sink: int,
    recent: int,
    allocation: str = "measured",
    schedule: Schedule | None = None,
    bits: int | str = 16,
) -> list[Stream]:
    """Layers, one after the other, as a cache compresses them whose budgets follow from the prompt.

    Args:
        layers: every layer's prompt and its queries.
        budget: slots per KV head, on average over all heads.
        allocation: of that budget, or "schedule" with
        schedule: the shares.
        bits: 16, or "measured".
    """
    choices = CHOICES if bits == MEASURED else (FULL,)
    plan = Plan(allocation, Budget(budget), schedule, choices=choices)
    plan.begin(len(layers), layers[0][0].keys.shape[1])
    streams: list[Stream] = []
    for slots, seen in layers:
        streams.append(waiting(slots, seen, method, sink, recent))
        plan.hand_down(streams[-1], streams, prefill=True)
    return streams


def parts_of(stream: Stream) -> list[tuple[Slots, object]]:
    """The slots of a stream, heads of different size apart, each with the window around its sketch
    if there is one."""
    pages = getattr(stream.page, "pages", None)
    if pages is not None:
        return [(part.slots, part.window) for part in pages]
    held, slots = stream.held, stream.slots
    sketch = getattr(stream.method, "sketch", None)  # the page then holds the tokens after it only
    if sketch is not None or bool((held == slots.count).all()):
        return [(slots, stream.method)]
    return [
        (
            slots.map(lambda t, h=h, n=n: t[:, h : h + 1, t.shape[2] - n :]),  # type: ignore[misc]
            stream.method,
        )
        for h, n in enumerate(held.amax(0).tolist())
    ]
