"""Fast forms of ``attend``, each tested against it."""

from .decode import attend_one

__all__ = ["attend_one"]
