"""The base class of tasks: cases, fitting a prompt to a model, and a score for an answer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder


@dataclass(frozen=True)
class Case:
    """One question over one context.

    Attributes:
        task: the task's name and, after a slash, the data set: "longbench/multi_news".
        context: the first part of the prompt, which may be compressed before the question is known.
        question: the second part. The prompt is ``context + question``.
        answers: the right answer, or all of them for a metric that accepts several.
        max_new_tokens: largest number of tokens of an answer.
        group: keys by which results are grouped, such as ``{"lines": 200}`` or ``{"depth": 0.5}``.
        details: anything else that the score needs (JSON values).
        where: its origin, for messages.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    group: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def prompt(self) -> str:
        return self.context + self.question

    @property
    def id(self) -> str:
        """The same for the same prompt and answers, from any file."""
        text = "\x1f".join([self.prompt, *self.answers])
        return f"{self.task}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Reply:
    """An answer and what it cost, per case: seconds of a batch are divided by its rows.

    `slots` and the bytes are measured when the first answer token is out, `final_` ones after the
    last; the first token is the prefill's, `decode_tokens` come after it. `measured`: numbers by
    name, for tasks without text answers (`following`). `turns`: the answers of a session."""

    text: str
    prompt_tokens: int
    new_tokens: int
    slots: float
    kv_bytes: float
    exact_kv_bytes: float
    final_kv_bytes: float
    final_exact_kv_bytes: float
    peak_kv_bytes: float
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    measured: Mapping[str, float] = field(default_factory=dict)
    turns: Sequence[str] = field(default_factory=list)


class Task(ABC):
    """Base class of all tasks. A new task is one file with a subclass and an entry in
    ``tasks/__init__.py``."""

    name: ClassVar[str]

    @abstractmethod
    def cases(self) -> list[Case]:
        """All cases, in a fixed order.

        Raises:
            InputError: data is missing or damaged; the message names file, line and field.
        """

    @abstractmethod
    def score(self, case: Case, text: str) -> float:
        """The score of the answer ``text``, in [0, 1]."""

    def graded(self, case: Case, reply: Reply) -> float:
        """The score of a reply; a task without text answers uses the measured numbers instead."""
        return self.score(case, reply.text)

    def measured(self, case: Case, reply: Reply) -> Mapping[str, float]:
        """Numbers by name that are stored beside the score."""
        return reply.measured

    def encoded(self, case: Case, encoder: Encoder, limit: int, new_tokens: int) -> EncodedCase:
        """The case as token ids, with ``limit`` positions for the prompt.

        Raises:
            InputError: it does not fit.
        """
        fitted = self.fitted(case, encoder.tokenizer, limit)
        chat = fitted.details.get("chat") is not False
        return encoder.encode(fitted.context, fitted.question, case.where, new_tokens, chat)

    def fitted(self, case: Case, tokenizer: Any, limit: int) -> Case:
        """The case for a model with ``limit`` positions for the prompt. By default a case that is
        too long is refused later, with its name; a benchmark with its own rules for truncation
        applies them here."""
        return case


def mean(scores: Sequence[float]) -> float:
    """Mean score; 0 without any."""
    return sum(scores) / len(scores) if scores else 0.0
