"""The transformers integration."""

from .cache import SketchCache
from .compressing import compressing

__all__ = ["SketchCache", "compressing"]
