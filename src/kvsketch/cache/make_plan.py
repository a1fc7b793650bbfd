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

#: How a budget is divided: by name, by shares, or by what was measured beforehand.
Allocation = str | Path | Schedule | Curves | RetrievalHeads


def make_plan(
    budget: int | float | None,
    tolerance: float | None,
    allocation: Allocation,
    prefill: str | int,
    choices: Sequence[Bits] = (FULL,),
    reread: str | None = None,
) -> Plan:
    """The plan that a cache's arguments ask for.

    Raises:
        InputError: an argument out of range, or two that exclude each other.
    """
    if isinstance(allocation, RetrievalHeads):
        bits = "measured" if len(choices) > 1 else None
        share = share_of_heads(budget, tolerance=tolerance, bits=bits)
        return Plan("heads", share, retrieval=allocation)
    curves = schedule = None
    if isinstance(allocation, Curves):
        curves = allocation
    elif isinstance(allocation, Sequence) and not isinstance(allocation, str):
        schedule = allocation
    elif not isinstance(allocation, str) or allocation not in ALLOCATIONS:
        curves = _loaded(allocation)
    if tolerance is None:
        kind = "curves" if curves is not None else "schedule" if schedule is not None else None
        spent = Budget(0.5 if budget is None else budget)
        kind = kind or str(allocation)
        return Plan(kind, spent, schedule, curves, choices=choices, reread=reread)
    check_tolerance(tolerance, prefill)
    if schedule is not None:
        raise InputError(
            f"allocation={schedule!r:.60} and tolerance={tolerance!r} both say what every head "
            "keeps: give one"
        )
    most = None if budget is None else Budget(budget)
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
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, a list of shares, "
            "RetrievalHeads, Curves, or the path of a file of them"
        )
    return Curves.load(allocation)
