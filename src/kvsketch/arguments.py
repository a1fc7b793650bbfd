"""Checks of ``SketchCache`` arguments that do not need torch, so that commands can run them first.

The cache itself repeats them; a test checks that both raise the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path

from kvsketch.budget import ALLOCATIONS, Budget
from kvsketch.errors import InputError
from kvsketch.method_names import METHOD_NAMES, unknown_method

PREFILL_MODES = ("exact", "streaming")
#: sources of the queries that a compression uses, besides the user's own texts
QUERY_SOURCES = ("prompt", "reread", "local", "sample")
BITS = (16, 8, 4, "measured")


def check_arguments(
    method: str,
    *,
    budget: int | float | None = None,
    tolerance: float | None = None,
    max_budget: int | float | None = None,
    allocation: str | None = None,
    bits: int | str | None = None,
    sink: int = 4,
    recent: int = 32,
    prefill: str = "exact",
) -> None:
    """All arguments are those of ``SketchCache``.

    Raises:
        InputError: one is out of range, or two exclude each other.
    """
    if prefill not in PREFILL_MODES:
        raise InputError(f"prefill={prefill!r} must be one of {', '.join(PREFILL_MODES)}")
    named = isinstance(allocation, (str, Path)) and Path(allocation).is_file()
    if allocation is not None and allocation not in ALLOCATIONS and not named:
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, RetrievalHeads, "
            "Curves, or the path of a file of them"
        )
    if tolerance is not None:
        check_tolerance(tolerance, budget, prefill)
    elif max_budget is not None:
        raise InputError(f"max_budget={max_budget!r} bounds a tolerance, which was not given")
    for name, value in (("budget", budget), ("max_budget", max_budget)):
        if value is None:
            continue
        slots = Budget(value).value
        if isinstance(slots, int) and slots < sink + recent:
            raise InputError(
                f"{name}={value} is smaller than sink={sink} + recent={recent}: raise the budget "
                "or lower sink and recent"
            )
    if method not in METHOD_NAMES:
        raise unknown_method(method)
    if bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise InputError(
            f"bits={bits!r} must be one of 16 (keys and values as the model has them), 8 or 4, "
            "or 'measured'"
        )


def check_types(seed: object, options: object, schedule: object) -> None:
    """Raise InputError unless a seed is an int, the options of a method are named, and a schedule
    is a list."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise InputError(f"seed={seed!r} must be an int")
    if not -(2**63) <= int(seed) < 2**63:
        raise InputError(f"seed={seed} must fit into 64 bits")
    if isinstance(schedule, str) or not isinstance(schedule, Sequence | None):
        raise InputError(
            f"schedule={schedule!r} must be a list of shares, one per layer or one list per layer"
        )
    if options is not None and not isinstance(options, Mapping):
        raise InputError(
            f"options={options!r} must be a dict of the method's own arguments by name, such as "
            '{"window": 64}; `kvsketch methods NAME` lists them'
        )


def check_tolerance(tolerance: float, budget: int | float | None, prefill: str) -> None:
    """Raise InputError unless a tolerance is valid and fits the other two arguments."""
    if budget is not None:
        raise InputError(
            f"budget={budget!r} and tolerance={tolerance!r} exclude each other; max_budget bounds "
            "what a tolerance may keep"
        )
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if not number or not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance!r} must be a relative error in (0, 1)")
    if prefill == "streaming":
        raise InputError(
            f"tolerance={tolerance!r} is measured on an exact prompt: prefill must be 'exact'"
        )
