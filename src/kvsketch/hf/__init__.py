"""The transformers integration."""

from .cache import SketchCache
from .context import compressing
from .reading import prefill

__all__ = ["SketchCache", "compressing", "prefill"]
