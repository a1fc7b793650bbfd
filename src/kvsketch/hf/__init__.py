"""The transformers integration."""

from .cache import SketchCache
from .context import compressing
from .head_scores import measure_heads
from .reading import prefill

__all__ = ["SketchCache", "compressing", "measure_heads", "prefill"]
