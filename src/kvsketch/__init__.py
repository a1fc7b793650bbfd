"""kvsketch keeps the KV cache of long-context language models small while it streams."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import InputError, KVSketchError, UnsupportedError

if TYPE_CHECKING:
    from .budget import Budget
    from .compressors import METHODS
    from .evaluation.allocation import measure_curves, measure_schedule
    from .hf import SketchCache, compressing
    from .slots import Observed, Slots, attend
    from .streaming import ALL_METHODS, SKETCHES, Curves

__version__ = "0.1.0"

__all__ = [
    "ALL_METHODS",
    "METHODS",
    "SKETCHES",
    "Budget",
    "Curves",
    "InputError",
    "KVSketchError",
    "Observed",
    "SketchCache",
    "Slots",
    "UnsupportedError",
    "__version__",
    "attend",
    "compressing",
    "measure_curves",
    "measure_schedule",
]

# Imported when first asked for: torch and transformers take seconds, `kvsketch --help` must not.
_LAZY = {
    "ALL_METHODS": "streaming",
    "METHODS": "compressors",
    "measure_curves": "evaluation.allocation",
    "measure_schedule": "evaluation.allocation",
    "Curves": "streaming",
    "SKETCHES": "streaming",
    "Budget": "budget",
    "Observed": "slots",
    "SketchCache": "hf",
    "compressing": "hf",
    "Slots": "slots",
    "attend": "slots",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
