"""Checks of ``SketchCache`` arguments that do not need torch, so that commands can run them first.

The cache itself repeats them; a test checks that both raise the same messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real
from pathlib import Path

from kvsketch.budget import ALLOCATIONS, Budget
from kvsketch.errors import InputError, check_seed, unknown_name
from kvsketch.method_names import METHOD_NAMES, unknown_method

PREFILL_MODES = ("exact", "streaming")
#: so many tokens of a prompt are compressed together while it is read
PIECE = 1024
#: recent tokens that are kept if no number is given
RECENT = 32
#: sources of the queries that a compression uses, besides the user's own texts
QUERY_SOURCES = ("prompt", "reread", "local", "sample")
BITS = (16, 8, 4, "measured")
#: what a cache can keep besides the slots of its budget
KEEPS = ("decoded", "positions", "errors")
#: arguments that ``SketchCache`` had, and what to write now
_FORMER = {
    "max_budget": "beside tolerance, budget is the limit",
    "schedule": "allocation takes the shares",
    "prompt_length": "prefill takes the number of tokens of the prompt",
    "buffer": "it is 2.5% of the budget, at most 64 slots",
    "one_shot": 'keep=["decoded"] keeps all decoded tokens',
    "track_positions": 'keep=["positions"] stores them',
    "track_error": 'keep=["errors"] does',
}


def check_arguments(
    method: str,
    *,
    budget: int | float | None = None,
    tolerance: float | None = None,
    allocation: str | None = None,
    bits: int | str | None = None,
    sink: int = 4,
    recent: int | None = None,
    prefill: str | int = "exact",
) -> None:
    """All arguments are those of ``SketchCache``.

    Raises:
        InputError: one is out of range, or two exclude each other.
    """
    check_prefill(prefill)
    named = isinstance(allocation, (str, Path)) and Path(allocation).is_file()
    if allocation is not None and allocation not in ALLOCATIONS and not named:
        raise InputError(
            f"allocation={allocation!r} must be one of {', '.join(ALLOCATIONS)}, a list of shares, "
            "RetrievalHeads, Curves, or the path of a file of them"
        )
    if tolerance is not None:
        check_tolerance(tolerance, prefill)
    if budget is not None:
        check_budget(Budget(budget), sink, RECENT if recent is None else recent)
    if method not in METHOD_NAMES:
        raise unknown_method(method)
    if bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise InputError(
            f"bits={bits!r} must be one of 16 (keys and values as the model has them), 8 or 4, "
            "or 'measured'"
        )


def check_types(seed: object, options: object, keep: object) -> None:
    """Raise InputError unless a seed is an int, the options of a method are named, and what is to
    be kept is a collection of known names."""
    check_seed(seed)
    if options is not None and not isinstance(options, Mapping):
        raise InputError(
            f"options={options!r} must be a dict of the method's own arguments by name, such as "
            '{"window": 64}; `kvsketch methods NAME` lists them'
        )
    names = keep if isinstance(keep, Collection) and not isinstance(keep, str) else [keep]
    for name in names:
        if name not in KEEPS or isinstance(keep, str):
            raise InputError(f"keep={keep!r} must be a list of some of {', '.join(KEEPS)}")


def check_former(given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise InputError for an argument that ``SketchCache`` does not have, or no longer has."""
    for name, value in given.items():
        if name in _FORMER:
            raise InputError(f"{name}={value!r:.60} is no argument any more: {_FORMER[name]}")
        raise unknown_name("argument", name, known)


def check_prefill(prefill: object) -> None:
    """Raise InputError unless it is one of the modes, or a number of tokens."""
    if prefill not in PREFILL_MODES and not (type(prefill) is int and prefill >= 1):
        raise InputError(
            f"prefill={prefill!r} must be one of {', '.join(PREFILL_MODES)}, or the number of "
            "tokens of a prompt that is read in chunks"
        )


def check_budget(budget: Budget, sink: int, recent: int) -> None:
    """Raise InputError if sinks and recent window are more than a budget of tokens."""
    if isinstance(budget.value, int) and budget.value < sink + recent:
        raise InputError(
            f"budget={budget.value} is smaller than sink={sink} + recent={recent}: raise the "
            "budget or lower sink and recent"
        )


def check_tolerance(tolerance: float, prefill: object) -> None:
    """Raise InputError unless a tolerance is valid and fits the prefill."""
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if not number or not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance!r} must be a relative error in (0, 1)")
    if prefill == "streaming":
        raise InputError(
            f"tolerance={tolerance!r} is measured on an exact prompt: prefill must be 'exact'"
        )
