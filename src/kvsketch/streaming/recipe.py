"""How the driver of a layer is made: the method, its window, and what the driver is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..budget import Budget
from .head_groups import HeadGroups
from .methods import Method, windowed
from .periodic import Periodic, Reducer


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
