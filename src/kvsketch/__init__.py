"""kvsketch keeps the KV cache of long-context language models small while it streams."""

from .budget import Budget
from .compressors import METHODS
from .errors import InputError, KVSketchError, UnsupportedError
from .hf import SketchCache
from .slots import Observed, Slots, attend

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Budget",
    "InputError",
    "KVSketchError",
    "Observed",
    "SketchCache",
    "Slots",
    "UnsupportedError",
    "__version__",
    "attend",
]
