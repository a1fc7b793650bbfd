"""What a case is answered with: a method, how much it may keep, and a seed; read from text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsketch.budget import ALLOCATIONS, Budget
from kvsketch.errors import InputError, unknown_name
from kvsketch.method_names import METHOD_NAMES

EXACT = "exact"
#: how slots are stored, as it is written behind a method
BITS: dict[str, int | str] = {"16bit": 16, "int8": 8, "int4": 4, "measured": "measured"}
#: first and last tokens that are always kept: numbers (int) or shares of the tokens (float)
Window = tuple[int | float, int | float]


@dataclass(frozen=True)
class Setup:
    """One way to answer.

    Attributes:
        method: "exact" (transformers' own cache) or a name in ``METHOD_NAMES``.
        budget: as for ``SketchCache``; None with a tolerance.
        tolerance: of the measured error, instead of a budget.
        allocation: how the budget is spent, as for ``SketchCache``; None: the method's own way.
        bits: of the slots: 16, 8, 4 or "measured"; None: the method's own way.
        seed: of random methods.
        window: (first, last) tokens always kept, instead of the run's ``--sink`` and ``--recent``.
            A float is a share of the tokens that are compressed; None: the run's.
    """

    method: str
    budget: int | float | None = 1.0
    tolerance: float | None = None
    allocation: str | None = None
    bits: int | str | None = None
    seed: int = 0
    window: Window | None = None

    @property
    def label(self) -> str:
        """As it is written in ``--methods``: ``method[:first:last][@allocation][+bits]``."""
        kept = ":{}:{}".format(*self.window) if self.window else ""
        spent = f"@{Path(self.allocation).stem}" if self.allocation else ""
        stored = next((f"+{name}" for name, bits in BITS.items() if bits == self.bits), "")
        return f"{self.method}{kept}{spent}{stored}"

    def window_of(self, sink: int, recent: int | None, tokens: int) -> tuple[int, int | None]:
        """First and last tokens always kept where ``tokens`` are compressed.

        Args:
            sink, recent: of the run, for a method without a window of its own.
        """
        if self.window is None:
            return sink, recent
        first, last = (
            math.floor(part * tokens + 1e-9) if isinstance(part, float) else part
            for part in self.window
        )
        if isinstance(self.budget, int) and not all(isinstance(part, int) for part in self.window):
            first = min(first, self.budget)  # a share may ask for more than there is
            last = min(last, self.budget - first)
        return first, last

    def goal(self) -> dict[str, Any]:
        """What it may keep, as arguments of ``SketchCache``."""
        names = ("budget", "tolerance", "allocation", "bits")
        return {name: getattr(self, name) for name in names}

    @property
    def kept(self) -> str:
        """What it may keep, for people."""
        return str(self.budget) if self.tolerance is None else f"tol {self.tolerance}"

    def identity(self) -> dict[str, Any]:
        """Everything here that an answer depends on. A seed does not matter to the exact cache."""
        if self.method == EXACT:
            return {"method": EXACT}
        # Without a window the identity is what it was before there were any: stores go on.
        return {k: v for k, v in self.__dict__.items() if k != "window" or v is not None}


def parse_method(text: str, allocation: str | None = None) -> Setup:
    """``name[:first:last][@allocation][+16bit|+int8|+int4|+measured]``, without a budget yet.

    Args:
        allocation: of methods that name none.

    Raises:
        InputError: an unknown method, window, allocation or ending.
    """
    rest, plus, ending = text.partition("+")
    if plus and ending not in BITS:
        raise unknown_name("the ending of a method", ending, BITS)
    named, at, spent = rest.partition("@")
    name, colon, window = named.partition(":")
    if name != EXACT and name not in METHOD_NAMES:
        raise unknown_name("method", name, [EXACT, *METHOD_NAMES])
    if name == EXACT:
        if at or plus or colon:
            raise InputError(
                f"method {text!r}: the exact cache has no window, no allocation and no bits"
            )
        return Setup(EXACT)
    chosen = spent if at else allocation
    if chosen is not None and chosen not in ALLOCATIONS and not Path(chosen).is_file():
        raise InputError(
            f"allocation {chosen!r} must be one of {', '.join(ALLOCATIONS)}, or a file written by "
            "kvsketch calibrate"
        )
    return Setup(
        name,
        allocation=chosen,
        bits=BITS[ending] if plus else None,
        window=_window(text, window) if colon else None,
    )


def _window(text: str, window: str) -> Window:
    """``first:last``, each a number of tokens or a share of the tokens in (0, 1)."""
    parts = window.split(":")
    found = [
        int(p) if p.isdecimal() else float(p) if re.fullmatch(r"0?\.\d+", p) else None
        for p in parts
    ]
    first, last = found if len(found) == 2 else (None, None)
    if first is None or last is None:
        raise InputError(
            f"method {text!r}: its window {window!r} must be FIRST:LAST, each a number of tokens "
            "that are always kept such as 4, or a share of the tokens such as 0.325"
        )
    return first, last


def parse_budget(text: str) -> int | float:
    """ "0.25" is a share of the bytes, "1024" the bytes of so many tokens per KV head.

    Raises:
        InputError: anything else.
    """
    text = text.strip()
    try:
        budget: int | float = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError as error:
        raise InputError(
            f"budget={text!r} is not a number; allowed: a share in (0, 1] such as 0.25, "
            "or a number of tokens per KV head such as 1024"
        ) from error
    return Budget(budget).value


def make_setups(
    methods: Sequence[str],
    budgets: Sequence[int | float],
    tolerances: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    allocation: str | None = None,
) -> list[Setup]:
    """Every method at every budget and tolerance, with every seed; "exact" once.

    Raises:
        InputError: no method, an unknown one, an impossible budget or tolerance, or nothing that
            says how much a method may keep.
    """
    parsed = [parse_method(text, allocation) for text in methods]
    if not parsed:
        raise InputError(f"--methods is empty; allowed: {', '.join([EXACT, *METHOD_NAMES])}")
    for budget in budgets:
        Budget(budget)  # raises
    for tolerance in tolerances:
        if not 0 < tolerance < 1:
            raise InputError(f"tolerance={tolerance!r} must be a relative error in (0, 1)")
    compressed = [setup for setup in parsed if setup.method != EXACT]
    if compressed and not (budgets or tolerances):
        raise InputError("--budgets is empty; give shares such as 0.25 or slots such as 1024")
    if not seeds:
        raise InputError("--seeds is empty; give at least one, such as 0")
    goals: list[dict[str, Any]] = [{"budget": budget} for budget in budgets]
    goals += [{"budget": None, "tolerance": tolerance} for tolerance in tolerances]
    found = [setup for setup in parsed if setup.method == EXACT]
    found += [
        replace(setup, **goal, seed=seed)
        for goal in goals
        for setup in compressed
        for seed in seeds
    ]
    return list({repr(setup): setup for setup in found}.values())
