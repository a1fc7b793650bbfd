"""How the driver of a layer is made: the method, its window, and what the driver is told."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..budget import Budget
from ..errors import InputError
from ..methods import Compressor, Windowed
from ..methods.registry import Method, class_of
from ..methods.sketches import Sketch
from .head_groups import HeadGroups
from .periodic import Periodic, Reducer
from .windowed_sketch import WindowedSketch


@dataclass(frozen=True)
class Recipe:
    """Makes fresh methods and drivers, the same way every time. It holds no function of its own, so
    that what holds it can be copied to another process.

    Attributes:
        method: a name, a compressor, or a class, see ``windowed``.
        sink: first tokens kept as they are.
        recent: last tokens kept as they are.
        seed: of this layer.
        stride: between the seeds of groups of heads, which differ like those of layers do.
        options: further arguments of the method.
        buffer: see ``Periodic``, as are the others.
    """

    method: Method
    sink: int
    recent: int
    seed: int = 0
    stride: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    buffer: int | None = None
    one_shot: bool = False
    bits: int = 16
    track_error: bool = False

    def at(self, index: int) -> Recipe:
        """For the layer of that index."""
        return replace(self, seed=self.seed + index)

    def reduce(self, number: int = 0) -> Reducer:
        """A fresh method for group ``number`` of the layer's heads."""
        seed = self.seed + number * self.stride
        return windowed(self.method, self.sink, self.recent, seed, self.options)

    def driver(self, budget: Budget, number: int = 0) -> Periodic:
        """A fresh driver for group ``number`` of the layer's heads."""
        return Periodic(
            self.reduce(number), budget, self.buffer, self.one_shot, self.bits, self.track_error
        )

    def build(self, budgets: Sequence[Budget]) -> Periodic | HeadGroups:
        """One driver for a layer, or one per group of KV heads with the same budget."""
        distinct = list(dict.fromkeys(budgets))
        if len(distinct) == 1:
            return self.driver(distinct[0])
        members = [[h for h, b in enumerate(budgets) if b == budget] for budget in distinct]
        drivers = [self.driver(budget, number) for number, budget in enumerate(distinct)]
        return HeadGroups(list(zip(members, drivers, strict=True)))


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
