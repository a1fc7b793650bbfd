"""Layers that are compressed to a budget as in a ``SketchCache``, but without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvsketch import Observed, Slots
from kvsketch.budget import Budget, Schedule
from kvsketch.cache import Plan, Stream, WindowedSketch, windowed
from kvsketch.cache.by_errors import ByErrors
from kvsketch.cache.goal import Goal
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.solvers import Shares
from kvsketch.cache.storage import CHOICES, MEASURED
from kvsketch.methods.sketches import Sketch
from kvsketch.page.quantized import FULL


def waiting(slots: Slots, seen: Observed, method: str, sink: int = 4, recent: int = 32) -> Stream:
    """A layer that has read its prompt and has no budget yet. ``kvsketch.cache.measure`` measures
    the errors of its heads, by which their budgets are allocated."""
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
    """The compressed layers of a cache whose budgets are allocated by measurements on the prompt.

    Args:
        layers: the prompt's slots and queries in every layer.
        budget: slots per KV head, on average over all heads.
        allocation: "measured", or "schedule".
        schedule: the shares of the budget, if ``allocation`` is "schedule".
        bits: the bits of the slots: 16, or "measured".
    """
    choices = CHOICES if bits == MEASURED else (FULL,)
    goal = Budget(budget)
    solver = Shares(goal, schedule) if allocation == "schedule" else ByErrors(Goal(goal))
    plan = Plan(solver, choices)
    plan.itemsize = 2
    plan.begin(len(layers), layers[0][0].keys.shape[1])
    streams: list[Stream] = []
    for slots, seen in layers:
        streams.append(waiting(slots, seen, method, sink, recent))
        plan.hand_down(streams[-1], streams, prefill=True)
    return streams


def sketch_of(method: object) -> Sketch | None:
    """The sketch of a method with its window; None: it is none."""
    return method.sketch if isinstance(method, WindowedSketch) else None


def parts_of(stream: Stream) -> list[tuple[Slots, object]]:
    """The slots of a stream, each with its method, which has the sketch if there is one. Heads of
    different size are separate, and have masses only if the stream stores them."""
    if isinstance(stream.page, SketchPage) and stream.page.places is not None:
        return [(group.slots, group.window) for group in stream.page.groups]
    held, slots = stream.held, stream.slots
    if slots.mass is not None and bool(((slots.mass == 0) | (slots.mass == 1)).all()):
        slots = replace(slots, mass=None)  # heads of different size are read with dead slots
    # A sketch outside the page is counted with its whole state, of all heads at once; its heads
    # need not hold equally many slots.
    if sketch_of(stream.method) is not None or bool((held == slots.count).all()):
        return [(slots, stream.method)]
    return [
        (
            slots.map(lambda t, h=h, n=n: t[:, h : h + 1, t.shape[2] - n :]),  # type: ignore[misc]
            stream.method,
        )
        for h, n in enumerate(held.amax(0).tolist())
    ]
