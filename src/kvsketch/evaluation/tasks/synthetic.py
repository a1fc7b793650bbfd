"""What tasks drawn from a seed, with prompts of a wanted length, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from kvsketch.errors import at_least
from kvsketch.evaluation.tasks.base import Task
from kvsketch.evaluation.tasks.haystack import Haystack, load_haystack


class Synthetic(Task):
    """Base class of needle and RULER.

    Args:
        lengths: tokens of prompt and answer together (``fitting``).
        num_cases: of each kind and length.
        haystack: a folder of .txt files (``load_haystack``).
        seed: of everything random.

    Raises:
        InputError: a length or num_cases below 1.
    """

    def __init__(
        self, lengths: Sequence[int], num_cases: int, haystack: Path | None, seed: int
    ) -> None:
        self.lengths = list(dict.fromkeys(at_least("length", n, 1) for n in lengths))
        self.num_cases = at_least("num_cases", num_cases, 1)
        self.folder = haystack
        self.seed = seed

    @cached_property
    def haystack(self) -> Haystack:
        return load_haystack(self.folder)
