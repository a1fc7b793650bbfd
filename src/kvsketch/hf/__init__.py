"""The transformers integration."""

from .cache import SketchCache

__all__ = ["SketchCache"]
