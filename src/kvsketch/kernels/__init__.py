"""Fast forms of ``attend``, each tested against it."""

from .sdpa import attend_sdpa

__all__ = ["attend_sdpa"]
