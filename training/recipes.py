"""The models that can be trained: tokenizer, data, curriculum and held-out cases of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsketch.evaluation.runner.longeval_cases import generate_cases
from training import data, evaluate, ruler_data, ruler_evaluate, ruler_schedule, schedule
from training.ruler_tokenizer import build_tokenizer as build_ruler_tokenizer
from training.tokenizer import build_tokenizer

HELD_OUT_SEED = 123_456_789


@dataclass(frozen=True)
class Recipe:
    """What one model is made by.

    Attributes:
        build_tokenizer: without arguments.
        sequences: from a tokenizer to something with ``batch(mixture, rng)``.
        stages: the curriculum.
        layers, wired: of the network (``network.build_model``).
        held_out: how many cases are kept for evaluation on the way, by name.
        cases: from the tokenizer, a name and a number to held-out cases.
        score: from the model, the tokenizer and cases to a mean score.
        new_tokens: longest answer, for the generation config.
    """

    build_tokenizer: Callable[[], Any]
    sequences: Callable[[Any], Any]
    stages: Sequence[schedule.Stage]
    layers: int
    held_out: Mapping[str, int]
    cases: Callable[[Any, str, int], list[Any]]
    score: Callable[[Any, Any, list[Any]], float]
    new_tokens: int
    wired: bool = False


RECIPES: Mapping[str, Recipe] = {
    "longeval": Recipe(
        build_tokenizer,
        data.Sequences,
        schedule.STAGES,
        layers=4,
        held_out={"200": 16, "300": 16, "400": 16, "680": 12},
        cases=lambda _, lines, count: generate_cases(int(lines), count, HELD_OUT_SEED),
        score=evaluate.forced,
        new_tokens=48,
    ),
    "ruler": Recipe(
        build_ruler_tokenizer,
        ruler_data.Sequences,
        ruler_schedule.STAGES,
        layers=5,
        held_out=ruler_evaluate.HELD_OUT,
        cases=lambda tokenizer, name, count: ruler_evaluate.cases(
            tokenizer, name, count, HELD_OUT_SEED
        ),
        score=ruler_evaluate.greedy,
        new_tokens=128,
        wired=True,
    ),
}
