"""What a task's score means: how it is averaged, written, drawn, and whether less is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvsketch.evaluation.runner.intervals import mean_interval, normal_interval


@dataclass(frozen=True)
class Scale:
    """The scale of one task's scores.

    Attributes:
        label: of an axis or a column.
        factor: scores are shown times this.
        top: the best a score can be; None where scores are errors, of which less is better.
        exponential: the mean is taken of logarithms (perplexity).
    """

    label: str = "score"
    factor: int = 1
    top: float | None = 1.0
    exponential: bool = False

    @property
    def is_error(self) -> bool:
        """Is less better?"""
        return self.top is None

    def summary(self, scores: Sequence[float]) -> tuple[float, float, float]:
        """Mean, and the ends of its 95% interval.

        Raises:
            InputError: no scores.
        """
        low, high = (normal_interval if self.is_error else mean_interval)(scores)
        found = (math.fsum(scores) / len(scores), max(0.0, low), high)
        return (math.exp(found[0]), math.exp(low), math.exp(high)) if self.exponential else found

    def best_first(self, score: float) -> float:
        """A key that sorts the best score first."""
        return score if self.is_error else -score

    def shown(self, score: float, digits: int = 3) -> str:
        """For people: two decimals, one where scores are times 100, ``digits`` of an error."""
        if self.is_error:
            if score < _NOTHING:
                return "0"
            return f"{score:,.0f}" if score >= 100 else f"{score:#.{digits}g}".rstrip(".")
        return f"{score * self.factor:.{2 if self.factor == 1 else 1}f}"

    def interval(self, ends: Sequence[float]) -> str:
        return "-".join(self.shown(end, digits=2) for end in ends)


#: below this an error is what rounding in float32 makes
_NOTHING = 2e-6
#: what is not here is a share of right answers, in [0, 1]
_SCALES = {
    # published times 100
    "longbench": Scale("score x 100", factor=100),
    "longbench_e": Scale("score x 100", factor=100),
    "kl": Scale("KL to exact, nats", top=None),
    "perplexity": Scale("perplexity", top=None, exponential=True),
    "attention_error": Scale("relative attention error", top=None),
}


def scale_of(task: str) -> Scale:
    """Of a task, or of one of its data sets ("longbench/multi_news")."""
    return _SCALES.get(task.partition("/")[0], Scale())
