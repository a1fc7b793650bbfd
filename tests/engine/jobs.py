"""Requests of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks import vllm_engine as engine
from benchmarks.longeval import cases
from kvsketch.evaluation.runner.loading import resolve_model


def seams(values: Iterable[str], chosen: str) -> list[Any]:
    """Values of a parametrized test, one of which is run with every release of vLLM."""
    return [pytest.param(one, marks=pytest.mark.seams) if one == chosen else one for one in values]


def asked(count: int, tokens: int = 12, lines: int = 200) -> list[dict]:
    """LongEval questions, 200 lines of which are about 1,700 tokens."""
    _, rows = cases(lines, count, 0)
    return [{"prompt": row["prompt"], "max_tokens": tokens} for row in rows]


def right(found: dict, count: int) -> int:
    """How many of their answers are right."""
    return engine.right(cases(200, count, 0)[1], [answer["text"] for answer in found["answers"]])


def about_documents(count: int) -> list[dict]:
    """Requests with a document alone, then with questions about it, some of which are about a
    shortened document."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(engine.MODEL))
    found = []
    for row in cases(200, count, 0)[1]:
        prompt = tokenizer(row["prompt"]).input_ids
        document, question = prompt[:-60], prompt[-60:]
        found.append({"prompt": document, "max_tokens": 1})
        for cut in (0, 5, 9):
            found.append({"prompt": document[: len(document) - cut] + question, "max_tokens": 12})
    return found
