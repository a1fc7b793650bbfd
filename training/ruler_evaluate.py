"""How well the RULER model answers held-out cases of the evaluation's own tasks, by real greedy
decoding: some answers may come in any order. Essays are generated too: real ones are not seen
before the model is done."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvsketch.evaluation.runner.longeval import LinesCase
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.evaluation.tasks.haystack import Haystack
from kvsketch.evaluation.tasks.longeval import LongEval
from kvsketch.evaluation.tasks.ruler import Ruler
from training.ruler_documents import Prose

LENGTH = 4000
LINES = 200
_SUBTASKS = (
    "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2",
    "niah_multivalue", "niah_multiquery", "vt", "cwe",
)  # fmt: skip
HELD_OUT = {"longeval": 4, **dict.fromkeys(_SUBTASKS, 4)}


def cases(
    tokenizer: PreTrainedTokenizerBase, name: str, count: int, seed: int
) -> list[tuple[Task, Case]]:
    """Held-out cases of `LENGTH` tokens, or `LINES` lines."""
    if name == "longeval":
        lines = [
            LinesCase(case["prompt"], case["expected_number"], LINES, f"held out {i}")
            for i, case in enumerate(generate_cases(LINES, count, seed))
        ]
        task: Task = LongEval(lines)
    else:
        task = Ruler([name], [LENGTH], count, seed=seed)
        words = " ".join(Prose("held out").sentences).split()
        task.haystack = Haystack("generated", tuple(words))
    return [(task, task.fitted(case, tokenizer, LENGTH)) for case in task.cases()]


@torch.no_grad()
def greedy(
    model: Any, tokenizer: PreTrainedTokenizerBase, held_out: list[tuple[Task, Case]]
) -> float:
    """Mean score, one case after another."""
    total = 0.0
    for task, case in held_out:
        prompt = tokenizer(case.prompt, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=case.max_new_tokens, do_sample=False)
        said = output[0, prompt["input_ids"].shape[1] :]
        total += task.score(case, tokenizer.decode(said, skip_special_tokens=True))
    return total / max(len(held_out), 1)
