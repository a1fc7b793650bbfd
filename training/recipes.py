"""The models that can be trained: tokenizer, data, curriculum and held-out cases of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsketch.evaluation.runner.longeval_cases import generate_cases
from training import data, evaluate, ruler_data, ruler_evaluate, ruler_schedule, schedule
from training.network import Shape
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
        shape: of the network.
        held_out: how many cases are kept for evaluation on the way, by name.
        cases: from the tokenizer, a name and a number to held-out cases.
        score: from the model, the tokenizer and cases to a mean score.
        new_tokens: longest answer, for the generation config.
        parent: the recipe of the model that it may start from, besides its own; "": none.
    """

    build_tokenizer: Callable[[], Any]
    sequences: Callable[[Any], Any]
    stages: Sequence[schedule.Stage]
    shape: Shape
    held_out: Mapping[str, int]
    cases: Callable[[Any, str, int], list[Any]]
    score: Callable[[Any, Any, list[Any]], float]
    new_tokens: int
    parent: str = ""


RECIPES: dict[str, Recipe] = {
    "longeval": Recipe(
        build_tokenizer,
        data.Sequences,
        schedule.STAGES,
        shape=Shape(layers=4, heads=4, kv_heads=2),
        held_out={"200": 16, "300": 16, "400": 16, "680": 12},
        cases=lambda _, lines, count: generate_cases(int(lines), count, HELD_OUT_SEED),
        score=evaluate.forced,
        new_tokens=48,
    ),
    "spread": Recipe(
        build_ruler_tokenizer,
        ruler_data.Sequences,
        ruler_schedule.STAGES,
        shape=Shape(layers=6, heads=8, kv_heads=4, wired=True),
        held_out=ruler_evaluate.HELD_OUT,
        cases=lambda tokenizer, name, count: ruler_evaluate.cases(
            tokenizer, name, count, HELD_OUT_SEED
        ),
        score=ruler_evaluate.greedy,
        new_tokens=128,
    ),
}
RECIPES["lists"] = replace(
    RECIPES["spread"], stages=ruler_schedule.LISTS_STAGES, parent="spread", new_tokens=1024
)
