"""The plan that a cache's arguments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.arguments import check_tolerance
from kvsketch.budget import ALLOCATIONS, Budget, Schedule
from kvsketch.cache.by_errors import ByCurves, ByErrors
from kvsketch.cache.curves import Curves
from kvsketch.cache.goal import Goal
from kvsketch.cache.plan import Plan
from kvsketch.cache.retrieval_heads import RetrievalHeads, share_of_heads
from kvsketch.cache.solvers import ByScores, Heads, Shares, Solver
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
        return Plan(Heads(share, allocation))
    curves = schedule = None
    if isinstance(allocation, Curves):
        curves = allocation
    elif isinstance(allocation, Sequence) and not isinstance(allocation, str):
        schedule = allocation
    elif not isinstance(allocation, str) or allocation not in ALLOCATIONS:
        curves = _loaded(allocation)
    if tolerance is None:
        spent = Budget(0.5 if budget is None else budget)
        if curves is not None:
            return Plan(ByCurves(Goal(spent), curves), choices)
        if schedule is not None:
            return Plan(Shares(spent, schedule), choices)
        again = None if reread is None else _named(reread, spent)
        return Plan(_named(str(allocation), spent), choices, again)
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
    goal = Goal(None, float(tolerance), most)
    return Plan(ByErrors(goal) if curves is None else ByCurves(goal, curves), choices)


def _named(name: str, budget: Budget) -> Solver:
    """The solver of one of ``ALLOCATIONS``."""
    if name == "even":
        return Shares(budget)
    return ByErrors(Goal(budget)) if name == "measured" else ByScores(name, budget)


def _loaded(allocation: Any) -> Curves:
    if not isinstance(allocation, (str, Path)) or not Path(allocation).is_file():
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, a list of shares, "
            "RetrievalHeads, Curves, or the path of a file of them"
        )
    return Curves.load(allocation)
