"""Every method by name: compressors and natively streaming sketches under one roof."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

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


#: What says how a cache compresses: a name in ``ALL_METHODS``, one's own class, or a compressor
Method = str | Compressor | type[Compressor] | type[Sketch]


def class_of(method: Method) -> type[Compressor] | type[Sketch]:
    """The class of a method.

    Raises:
        InputError: an unknown name, or no method at all.
    """
    if isinstance(method, str):
        if method not in ALL_METHODS:
            raise unknown_name("method", method, ALL_METHODS)
        return ALL_METHODS[method]
    cls = method if isinstance(method, type) else type(method)
    if isinstance(method, Sketch) or not issubclass(cls, (Compressor, Sketch)):
        raise InputError(
            f"method={method!r} must be a name (see `kvsketch methods`), a Compressor or its "
            "class, or the class of a Sketch, which is made when its size is known"
        )
    if not isinstance(getattr(cls, "name", None), str):
        raise InputError(f"method={method!r} has no name: give its class a `name`")
    return cls


def default_schedule(
    method: Method, layers: int, budget: Budget, recent: int
) -> list[float] | None:
    """A method's own shares of the budget per layer, or None: the same everywhere."""
    shares = getattr(class_of(method), "shares", None)
    return None if shares is None else shares(layers, budget, recent)


def default_allocation(method: Method) -> str:
    """A method's own way to spend a budget: "measured" or "even"."""
    found: str = getattr(class_of(method), "allocation", "even")
    return found


def windowed(
    method: Method,
    sink: int = 4,
    recent: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Windowed | WindowedSketch:
    """A fresh method inside its sink and recent window.

    Args:
        method: a name in ``ALL_METHODS``, or a class or compressor of the caller's own. A
            compressor is copied; its copy's random stream starts from its seed plus ``seed``.
        options: further arguments of the method's constructor; not with a compressor, which has
            them already.

    Raises:
        InputError: unknown method, or an argument the method does not take or allow.
    """
    options = dict(options or {})
    cls = class_of(method)
    if isinstance(method, Compressor):
        if options:
            raise InputError(f"options={options!r}: give them to {cls.__name__} itself")
        twin = copy.deepcopy(method)
        twin.seed = method.seed + seed
        twin.generator = torch.Generator().manual_seed(twin.seed)
        return Windowed(twin, sink, recent)
    try:
        if issubclass(cls, Compressor):
            return Windowed(cls(seed=seed, **options), sink, recent)
        build: Callable[[int], Sketch] = functools.partial(cls.for_budget, seed=seed, **options)
        build(1024)  # wrong options should fail now, not at the first compression
        return WindowedSketch(build, sink, recent, _least(build, cls.least_slots))
    except TypeError as error:
        raise InputError(f"options={options!r} do not fit method={cls.name!r}: {error}") from None


def _least(build: Callable[[int], Sketch], slots: int) -> int:
    """The smallest number of slots that a sketch can be built for, which options may raise."""
    while True:
        try:
            build(slots)
        except InputError:
            slots += 1
        else:
            return slots
