"""What a task is: cases, how a prompt is made to fit a model, and a score for an answer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder
    from kvsketch.evaluation.runner.replies import Reply


@dataclass(frozen=True)
class Case:
    """One question over one context.

    Attributes:
        task: the task's name and, after a slash, the data set: "longbench/multi_news".
        context: what comes first: all that may be compressed before the question is known.
        question: what follows it. The prompt is ``context + question``.
        answers: what is right; for a metric that takes several, all of them.
        max_new_tokens: longest answer.
        group: what results are reported by, such as ``{"lines": 200}`` or ``{"depth": 0.5}``.
        details: anything else the score needs (JSON values).
        where: where it came from, for messages.
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
        """The same for the same prompt and answers, whatever file they came in."""
        text = "\x1f".join([self.prompt, *self.answers])
        return f"{self.task}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Task(ABC):
    """Base class of all tasks. A new task is one file with a subclass and an entry in
    ``tasks/__init__.py``."""

    name: ClassVar[str]

    @abstractmethod
    def cases(self) -> list[Case]:
        """All cases, in a fixed order.

        Raises:
            InputError: data that is missing or damaged, naming file, line and field.
        """

    @abstractmethod
    def score(self, case: Case, text: str) -> float:
        """How good the answer ``text`` is, in [0, 1]."""

    def graded(self, case: Case, reply: Reply) -> float:
        """The score of what came back; a task that is not answered in words looks at what was
        measured instead."""
        return self.score(case, reply.text)

    def encoded(self, case: Case, encoder: Encoder, limit: int, new_tokens: int) -> EncodedCase:
        """The case as token ids, with ``limit`` positions for the prompt.

        Raises:
            InputError: it does not fit.
        """
        fitted = self.fitted(case, encoder.tokenizer, limit)
        chat = fitted.details.get("chat") is not False
        return encoder.encode(fitted.context, fitted.question, case.where, new_tokens, chat)

    def fitted(self, case: Case, tokenizer: Any, limit: int) -> Case:
        """The case as it is put to a model with ``limit`` positions for the prompt. By default a
        case that is too long is refused later, by name; a benchmark with rules of its own for
        truncation applies them here."""
        return case


def mean(scores: Sequence[float]) -> float:
    """Mean score; 0 without any."""
    return sum(scores) / len(scores) if scores else 0.0
