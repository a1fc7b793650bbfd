"""Makes a method with its window: sinks, and recent tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from kvsketch import random_numbers
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import InputError
from kvsketch.methods.base import Compressor
from kvsketch.methods.registry import Method, class_of
from kvsketch.methods.sketches import Sketch
from kvsketch.methods.window import check_window


def windowed(
    method: Method,
    sink: int = 4,
    recent: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Compressor | WindowedSketch:
    """A new method with its window.

    Args:
        method: a name in ``ALL_METHODS``, or a class or compressor of the caller's own. A
            compressor is copied; its copy's random stream starts from its seed plus ``seed``.
        options: further arguments of the method's constructor; not with a compressor, which has
            them already.

    Raises:
        InputError: unknown method, an argument the method does not take or allow, or sink or recent
            negative or not an int.
    """
    check_window(sink, recent)
    options = dict(options or {})
    cls = class_of(method)
    if not isinstance(method, (str, type)):
        if options:
            raise InputError(f"options={options!r}: give them to {cls.__name__} itself")
        twin = copy.deepcopy(method)
        twin.seed = method.seed + seed
        twin.generator = random_numbers.generator(twin.seed)
        return _within(twin, sink, recent)
    try:
        if issubclass(cls, Compressor):
            return _within(cls(seed=seed, **options), sink, recent)
        build: Callable[[int], Sketch] = functools.partial(cls.for_budget, seed=seed, **options)
        build(1024)  # wrong options should fail now, not at the first compression
        return WindowedSketch(build, sink, recent, _least(build, cls.least_slots))
    except TypeError as error:
        raise InputError(f"options={options!r} do not fit method={cls.name!r}: {error}") from None


def _within(method: Compressor, sink: int, recent: int) -> Compressor:
    method.around = sink, recent
    return method


def _least(build: Callable[[int], Sketch], slots: int) -> int:
    """The smallest number of slots that a sketch can be built for, which options may raise."""
    while True:
        try:
            build(slots)
        except InputError:
            slots += 1
        else:
            return slots
