"""The arguments that say how much is kept, checked together."""

from __future__ import annotations

from pathlib import Path

from ..arguments import check_tolerance
from ..budget import ALLOCATIONS, Budget, Schedule
from ..cache import Curves, Goal
from ..errors import InputError


def make_goal(
    budget: int | float | None,
    tolerance: float | None,
    max_budget: int | float | None,
    allocation: str | Path | Curves,
    schedule: Schedule | None,
    prefill: str,
) -> Goal:
    """What the budgets are to achieve.

    Raises:
        InputError: an argument out of range, or two that exclude each other.
    """
    curves = None
    if isinstance(allocation, Curves):
        curves = allocation
    elif isinstance(allocation, Path) or allocation not in ALLOCATIONS:
        curves = _loaded(allocation)
    if schedule is not None and (allocation != "even" or tolerance is not None):
        given = f"tolerance={tolerance!r}" if tolerance is not None else f"{allocation=}"
        raise InputError(f"schedule and {given} both say how the budget is spent: give one")
    if tolerance is None:
        if max_budget is not None:
            raise InputError(f"max_budget={max_budget!r} bounds a tolerance, which was not given")
        return Goal(Budget(0.5 if budget is None else budget), curves=curves)
    check_tolerance(tolerance, budget, prefill)
    most = None if max_budget is None else Budget(max_budget)
    return Goal(None, float(tolerance), most, curves)


def _loaded(allocation: object) -> Curves:
    if not isinstance(allocation, (str, Path)) or not Path(allocation).is_file():
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, Curves, or the "
            "path of a file of them"
        )
    return Curves.load(allocation)


def check_curves(curves: Curves | None, layers: int, heads: int) -> None:
    if curves is not None and tuple(curves.error.shape[:2]) != (layers, heads):
        found = curves.error.shape
        raise InputError(
            f"allocation: the curves are of {found[0]} layers x {found[1]} KV heads, the model "
            f"compresses {layers} x {heads}"
        )
