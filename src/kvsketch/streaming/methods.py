"""Every method by name: compressors and natively streaming sketches under one roof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..budget import Budget
from ..compressors import METHODS, Compressor, Windowed
from ..errors import InputError, unknown_name
from .balancekv import BalanceKVStreaming
from .base import Sketch
from .merge_reduce import MergeReduce
from .one_dimensional import OneDimensional
from .sliding_window import SlidingWindow, SlidingWindowSampled
from .subgen import SubGen, SubGenCoupled
from .windowed_sketch import WindowedSketch

#: The natively streaming sketches, by name. To add one: write its file, add its class here.
SKETCHES: dict[str, type[Sketch]] = {
    cls.name: cls
    for cls in (
        SubGen,
        SubGenCoupled,
        MergeReduce,
        BalanceKVStreaming,
        SlidingWindow,
        SlidingWindowSampled,
        OneDimensional,
    )
}

#: Everything ``SketchCache`` takes as a method.
ALL_METHODS: dict[str, type[Compressor] | type[Sketch]] = {**METHODS, **SKETCHES}


def default_schedule(method: str, layers: int, budget: Budget, recent: int) -> list[float] | None:
    """A method's own shares of the budget per layer, or None: the same everywhere."""
    cls = ALL_METHODS.get(method)
    shares = getattr(cls, "shares", None)
    return None if shares is None else shares(layers, budget, recent)


def default_allocation(method: str) -> str:
    """A method's own way to spend a budget: "measured" or "even"."""
    found: str = getattr(ALL_METHODS.get(method), "allocation", "even")
    return found


def windowed(
    method: str,
    sink: int = 4,
    recent: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Windowed | WindowedSketch:
    """A fresh method inside its sink and recent window.

    Args:
        method: a name in ``ALL_METHODS``.
        options: further arguments of the method's constructor.

    Raises:
        InputError: unknown method, or an argument the method does not take or allow.
    """
    options = dict(options or {})
    if method not in ALL_METHODS:
        raise unknown_name("method", method, ALL_METHODS)
    try:
        if method in METHODS:
            return Windowed(METHODS[method](seed=seed, **options), sink, recent)

        def build(slots: int) -> Sketch:
            return SKETCHES[method].for_budget(slots, seed=seed, **options)

        build(64)  # wrong options should fail now, not at the first compression
        return WindowedSketch(build, sink, recent, SKETCHES[method].least_slots)
    except TypeError as error:
        raise InputError(f"options={options!r} do not fit method={method!r}: {error}") from None
