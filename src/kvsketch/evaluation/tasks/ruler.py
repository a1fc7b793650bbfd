"""RULER's synthetic tasks (Hsieh et al. 2024, arXiv:2404.06654; github NVIDIA/RULER).

Its eleven tasks that need no data set of their own (all but the two of question answering), at the
settings of its scripts/synthetic.yaml, with the templates and answer lengths of
scripts/data/synthetic/constants.py. The prompt goes on to the official answer prefix, so that base
models answer too.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.errors import unknown_name
from kvsketch.evaluation.tasks.base import Case
from kvsketch.evaluation.tasks.fitting import Draft, Lengths, Synthetic, roughly_filled
from kvsketch.evaluation.tasks.ruler_chains import chains
from kvsketch.evaluation.tasks.ruler_needles import NEEDLES, needles
from kvsketch.evaluation.tasks.ruler_words import common_words, frequent_words

SUBTASKS = (*NEEDLES, "vt", "cwe", "fwe")


class Ruler(Synthetic):
    """Cases drawn from (subtask, length, seed, number).

    Args:
        subtasks: of ``SUBTASKS``.
        lengths: tokens of prompt and answer together (``fitting``).
        num_cases: per subtask and length.
        haystack: a folder of .txt files for the essays (``load_haystack``).
        seed: of everything random.

    Raises:
        InputError: an unknown subtask (naming the nearest), a length or num_cases below 1.
    """

    name = "ruler"

    def __init__(
        self,
        subtasks: Sequence[str],
        lengths: Sequence[int],
        num_cases: int = 10,
        haystack: Path | None = None,
        seed: int = 0,
    ) -> None:
        for subtask in subtasks:
            if subtask not in SUBTASKS:
                raise unknown_name("subtask", subtask, SUBTASKS)
        super().__init__(lengths, num_cases, haystack, seed)
        self.subtasks = list(dict.fromkeys(subtasks))

    def cases(self) -> list[Case]:
        """By subtask, length and number. Until ``fitted``, a token is taken for four characters."""
        return [
            self._case(subtask, length, index)
            for subtask in self.subtasks
            for length in self.lengths
            for index in range(self.num_cases)
        ]

    def fitted(self, case: Case, tokenizer: Any, limit: int) -> Case:
        """As long as its length says, by this tokenizer, less at most one unit of filling.

        Raises:
            InputError: a length too short for what is asked, beyond the limit, or (cwe) beyond the
                word list.
        """
        length, lengths = case.group["length"], Lengths(tokenizer)
        draft = self._draft(case.group["subtask"], length, case.details["index"], lengths)
        units = self.units(case, draft, lengths, limit)
        return dataclasses.replace(case, context=draft.context(units))

    def score(self, case: Case, text: str) -> float:
        """RULER's string_match_all: the share of answers that the text contains, in any case."""
        said = re.sub(r"[\x00-\x1f]", "\n", text).strip().lower()
        return sum(answer.lower() in said for answer in case.answers) / len(case.answers)

    def _case(self, subtask: str, length: int, index: int) -> Case:
        draft = self._draft(subtask, length, index, Lengths())
        return Case(
            task=f"{self.name}/{subtask}",
            context=draft.context(roughly_filled(draft, length)),
            question=draft.question,
            answers=draft.answers,
            max_new_tokens=draft.max_new_tokens,
            group={"subtask": subtask, "length": length},
            details={"index": index},
            where=f"ruler/{subtask} length={length} seed={self.seed} case {index}",
        )

    def _draft(self, subtask: str, length: int, index: int, lengths: Lengths) -> Draft:
        rng = random.Random(f"ruler/{subtask}/{length}/{self.seed}/{index}")
        if subtask == "vt":
            return chains(rng, length, lengths)
        if subtask == "cwe":
            return common_words(rng, length)
        if subtask == "fwe":
            return frequent_words(rng, length)
        return needles(NEEDLES[subtask], rng, lambda: self.haystack)
