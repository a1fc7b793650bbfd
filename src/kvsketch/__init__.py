"""kvsketch keeps the KV cache of long-context language models small, with measured error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsketch.errors import AccuracyWarning, InputError, KVSketchError, UnsupportedError

if TYPE_CHECKING:
    from kvsketch.budget import Budget
    from kvsketch.cache import Curves, RetrievalHeads
    from kvsketch.estimator import attend
    from kvsketch.hf import SketchCache, compressing, measure_heads, prefill
    from kvsketch.hf.measuring import measure_curves, measure_schedule
    from kvsketch.methods import METHODS
    from kvsketch.methods.registry import ALL_METHODS, SKETCHES
    from kvsketch.models import packaged_model
    from kvsketch.observed import Observed
    from kvsketch.slots import Slots

__version__ = "0.1.0"

__all__ = [
    "ALL_METHODS",
    "METHODS",
    "SKETCHES",
    "AccuracyWarning",
    "Budget",
    "Curves",
    "InputError",
    "KVSketchError",
    "Observed",
    "RetrievalHeads",
    "SketchCache",
    "Slots",
    "UnsupportedError",
    "__version__",
    "attend",
    "compressing",
    "measure_curves",
    "measure_heads",
    "measure_schedule",
    "packaged_model",
    "prefill",
]

# Imported on first use: torch and transformers take seconds to import, `kvsketch --help` must not.
_LAZY = {
    "ALL_METHODS": "methods.registry",
    "METHODS": "methods",
    "measure_curves": "hf.measuring",
    "measure_schedule": "hf.measuring",
    "Curves": "cache",
    "RetrievalHeads": "cache",
    "SKETCHES": "methods.registry",
    "Budget": "budget",
    "Observed": "observed",
    "SketchCache": "hf",
    "compressing": "hf",
    "measure_heads": "hf",
    "packaged_model": "models",
    "prefill": "hf",
    "Slots": "slots",
    "attend": "estimator",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
