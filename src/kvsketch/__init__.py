"""kvsketch keeps the KV cache of long-context language models small, with measured error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import AccuracyWarning, InputError, KVSketchError, UnsupportedError

if TYPE_CHECKING:
    from .budget import Budget
    from .cache import Curves, RetrievalHeads
    from .estimator import attend
    from .evaluation.runner.allocation import measure_curves, measure_schedule
    from .evaluation.runner.loading import packaged_model
    from .hf import SketchCache, compressing, measure_heads, prefill
    from .methods import METHODS
    from .methods.registry import ALL_METHODS, SKETCHES
    from .observed import Observed
    from .slots import Slots

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
    "measure_curves": "evaluation.runner.allocation",
    "measure_schedule": "evaluation.runner.allocation",
    "Curves": "cache",
    "RetrievalHeads": "cache",
    "SKETCHES": "methods.registry",
    "Budget": "budget",
    "Observed": "observed",
    "SketchCache": "hf",
    "compressing": "hf",
    "measure_heads": "hf",
    "packaged_model": "evaluation.runner.loading",
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
