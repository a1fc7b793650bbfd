"""LongEval's line retrieval as a task."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch.errors import InputError
from kvsketch.evaluation.runner import longeval
from kvsketch.evaluation.runner.longeval import QUESTION_MARK, read_answer
from kvsketch.evaluation.tasks.base import Case, Task


class LongEval(Task):
    """Line retrieval (Li et al. 2023), reported by lines.

    Args:
        cases: of ``longeval.load_case_files`` or ``longeval.make_cases``.
    """

    name = "longeval"

    def __init__(self, cases: Sequence[longeval.LinesCase]) -> None:
        self._cases = list(cases)

    def cases(self) -> list[Case]:
        """In the order given.

        Raises:
            InputError: a prompt without the official question.
        """
        return [self._split(case) for case in self._cases]

    def score(self, case: Case, text: str) -> float:
        """The benchmark's own rule: 1 if the last integer in the answer is the line's number."""
        return float(read_answer(text) == int(case.answers[0]))

    def _split(self, case: longeval.LinesCase) -> Case:
        cut = case.prompt.rfind(QUESTION_MARK)
        if cut < 0:
            raise InputError(
                f"{case.where}: the prompt has no {QUESTION_MARK.strip()!r} before the question"
            )
        return Case(
            task=self.name,
            context=case.prompt[:cut],
            question=case.prompt[cut:],
            answers=(str(case.expected),),
            max_new_tokens=32,
            group={"lines": case.lines},
            where=case.where,
        )
