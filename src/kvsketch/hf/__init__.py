"""The transformers integration."""

from kvsketch.hf.cache import SketchCache
from kvsketch.hf.context import compressing
from kvsketch.hf.head_scores import measure_heads
from kvsketch.hf.reading import prefill

__all__ = ["SketchCache", "compressing", "measure_heads", "prefill"]
