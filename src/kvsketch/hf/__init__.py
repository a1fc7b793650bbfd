"""The transformers integration."""

from .cache import SketchCache
from .context import compressing

__all__ = ["SketchCache", "compressing"]
