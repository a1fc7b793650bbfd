"""Layers about to be measured, as a ``SketchCache`` with measured allocation has them."""

from __future__ import annotations

from kvsketch import Observed, Slots
from kvsketch.budget import Budget
from kvsketch.cache import Planner, Recipe, Waiting
from kvsketch.cache.planned import Goal


def waiting(slots: Slots, seen: Observed, method: str, sink: int = 4, recent: int = 32) -> Waiting:
    """A layer that has its prompt: ``measured()`` are the errors its heads' budgets follow from."""
    planner = Planner(Goal(budget=Budget(0.25)), layers=1, heads=slots.keys.shape[1])
    layer = Waiting(0, planner, Recipe(method, sink, recent))
    layer.extend(slots)
    layer.settle(seen, prefill=True, hold=True)
    return layer
