"""The plan that a cache's arguments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.arguments import check_tolerance
from kvsketch.budget import ALLOCATIONS, Budget, Schedule
from kvsketch.cache.curves import Curves
from kvsketch.cache.plan import Plan
from kvsketch.cache.retrieval_heads import RetrievalHeads, share_of_heads
from kvsketch.errors import InputError
from kvsketch.page.quantized import FULL, Bits


def make_plan(
    budget: int | float | None,
    tolerance: float | None,
    max_budget: int | float | None,
    allocation: str | Path | Curves | RetrievalHeads,
    schedule: Schedule | None,
    prefill: str,
    choices: Sequence[Bits] = (FULL,),
    reread: str | None = None,
) -> Plan:
    """The plan that a cache's arguments ask for.

    Raises:
        InputError: an argument out of range, or two that exclude each other.
    """
    if isinstance(allocation, RetrievalHeads):
        bits = "measured" if len(choices) > 1 else None
        others = {"tolerance": tolerance, "max_budget": max_budget, "schedule": schedule}
        share = share_of_heads(budget, **others, bits=bits)
        return Plan("heads", share, retrieval=allocation)
    curves = None
    if isinstance(allocation, Curves):
        curves = allocation
    elif isinstance(allocation, Path) or allocation not in ALLOCATIONS:
        curves = _loaded(allocation)
    if schedule is not None and (allocation != "even" or tolerance is not None):
        given = f"tolerance={tolerance!r}" if tolerance is not None else f"{allocation=}"
        raise InputError(
            f"schedule and {given} both determine the allocation of the budget: give one"
        )
    if tolerance is None:
        if max_budget is not None:
            raise InputError(f"max_budget={max_budget!r} bounds a tolerance, which was not given")
        kind = "curves" if curves is not None else "schedule" if schedule is not None else None
        spent = Budget(0.5 if budget is None else budget)
        kind = kind or str(allocation)
        return Plan(kind, spent, schedule, curves, choices=choices, reread=reread)
    check_tolerance(tolerance, budget, prefill)
    most = None if max_budget is None else Budget(max_budget)
    if curves is not None and len(choices) > 1:
        raise InputError(
            f"bits='measured' and a tolerance ({tolerance!r}) by errors measured beforehand "
            "exclude each other, because these were measured for one number of bits: omit "
            "allocation, or give bits 16, 8 or 4"
        )
    if len(choices) > 1:
        choices = (FULL, *choices)  # the largest budget of a tolerance
    return Plan("tolerance", None, None, curves, float(tolerance), most, choices)


def _loaded(allocation: Any) -> Curves:
    if not isinstance(allocation, (str, Path)) or not Path(allocation).is_file():
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, RetrievalHeads, "
            "Curves, or the path of a file of them"
        )
    return Curves.load(allocation)
