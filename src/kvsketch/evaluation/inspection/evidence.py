"""The evidence of a case: where in its prompt the answers stand, in tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.evaluation.runner.encoding import Encoder
from kvsketch.evaluation.tasks.base import Case, Task


@dataclass(frozen=True)
class AskedCase:
    """A case as tokens: of the prompt, the number of the first of the question, and the tokens of
    the evidence."""

    case: Case
    ids: Tensor
    question: int
    evidence: Tensor


def evidence_in(context: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    """Begin and end of the lines or sentences that contain an answer as a word of its own."""
    found = []
    for answer in answers:
        for match in re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", context):
            begin = max(
                (context.rfind(end, 0, match.start()) + len(end) for end in ("\n", ". ", "? ")
                 if end in context[: match.start()]),
                default=0,
            )  # fmt: skip
            ends = (context.find(end, match.end()) for end in ("\n", ". "))
            found.append((begin, min((e for e in ends if e >= 0), default=len(context))))
    return sorted(set(found))


def ask(case: Case, task: Task, encoder: Encoder, limit: int, device: torch.device) -> AskedCase:
    """A case as tokens. Raises InputError if there is no evidence, UnsupportedError without the
    tokens' places."""
    case = task.fitted(case, encoder.tokenizer, limit - case.max_new_tokens)
    ids = encoder.encode(case.context, case.question, case.where, case.max_new_tokens).ids
    text, special = encoder.prompt(case.context, case.question)
    if not getattr(encoder.tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"{type(encoder.tokenizer).__name__} does not tell where its tokens begin: a fast "
            "tokenizer is needed to find the evidence"
        )
    encoded = encoder.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    at = text.find(case.context.strip())
    spans = evidence_in(text[at : at + len(case.context)], case.answers)
    if at < 0 or not spans:
        raise InputError(
            f"{case.where or case.task}: no answer stands in the context, so that nothing can be "
            "said to read it; tasks that work: longeval, needle and RULER's"
        )
    begins = [begin for begin, _ in encoded["offset_mapping"]]
    places = [
        number
        for number, (begin, end) in enumerate(encoded["offset_mapping"])
        if end > begin and any(begin < at + b and end > at + a for a, b in spans)
    ]
    cut = text.rfind(case.question.strip())
    first = next(number for number, begin in enumerate(begins) if begin >= cut)
    return AskedCase(case, torch.tensor([list(ids)], device=device), first, torch.tensor(places))
