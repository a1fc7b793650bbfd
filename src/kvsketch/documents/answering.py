"""Answers from a cache: token by token, for one row or for several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import random_numbers
from kvsketch.documents.document import Document
from kvsketch.errors import InputError, check_seed
from kvsketch.hf import SketchCache
from kvsketch.hf.passing import passed


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0: always the most likely one.
        seed: of the choices.

    Raises:
        InputError: a negative temperature.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < 100:
            raise InputError(f"temperature={self.temperature!r} must be a number from 0 to 100")
        check_seed(self.seed)

    def chooser(self) -> Callable[[Tensor], Tensor]:
        """Logits ``[rows, vocabulary]`` to ids ``[rows, 1]``."""
        if self.temperature == 0:
            return lambda logits: logits.argmax(-1, keepdim=True)
        generator = random_numbers.generator(self.seed)

        def choose(logits: Tensor) -> Tensor:
            chances = (logits.float() / self.temperature).softmax(-1).cpu()
            return torch.multinomial(chances, 1, generator=generator).to(logits.device)

        return choose


@torch.no_grad()
def next_tokens(
    model: Any, cache: SketchCache, ids: Tensor, sampling: Sampling
) -> Iterator[Tensor]:
    """Ids ``[rows, 1]`` of one token after the other, without end. A token is read into the cache
    when the one after it is asked for.

    Args:
        ids: what is said, int64 ``[rows, tokens]``.
    """
    choose = sampling.chooser()
    while True:
        found = model(ids, **passed(model, cache), use_cache=True, logits_to_keep=1)
        ids = choose(found.logits[:, -1])
        yield ids


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    told = model.generation_config.eos_token_id
    ends = set(told if isinstance(told, list) else [told]) | {tokenizer.eos_token_id}
    return {end for end in ends if end is not None}


def check_question(document: Document, ids: Tensor, question: str) -> None:
    """Raise InputError unless a question and a token of an answer fit the positions left."""
    left = document.positions_left
    if left is not None and ids.shape[1] + 1 > left:
        raise InputError(
            f"the question {question!r:.40} has {ids.shape[1]} tokens, and {left} of the model's "
            f"{document.cache.max_positions} positions are left; compress less of the document "
            "(--max-tokens)"
        )


def answers(
    document: Document,
    questions: Sequence[str],
    new_tokens: int = 64,
    batch: int = 8,
    sampling: Sampling = Sampling(),
) -> list[list[int]]:
    """Ids of an answer to every question, all from the same state: the document's cache stays
    unchanged.

    Questions of equally many tokens are answered side by side, ``batch`` at a time: nothing is
    padded, and what a row keeps does not depend on its neighbours, so that the answers are those of
    one question at a time, but for the rounding of products that are computed together.

    Raises:
        InputError: no question, an empty one, or one that does not fit the positions left.
    """
    wording = document.wording
    opening = wording.between if document.answered else wording.asking
    if not questions or not all(question.strip() for question in questions):
        raise InputError("there must be a question, and none may be empty")
    ids = [document.ids_of(opening + q + wording.answering) for q in questions]
    for one, question in zip(ids, questions, strict=True):
        check_question(document, one, question)
    found: list[list[int]] = [[] for _ in questions]
    for numbers in _alike([one.shape[1] for one in ids], batch if sampling.temperature == 0 else 1):
        together = torch.cat([ids[number] for number in numbers])
        for number, answer in zip(
            numbers, _answered(document, together, new_tokens, sampling), strict=True
        ):
            found[number] = answer
    return found


def _alike(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of questions of the same length, at most so many at a time."""
    for length in sorted(set(lengths)):
        same = [number for number, other in enumerate(lengths) if other == length]
        for start in range(0, len(same), most):
            yield same[start : start + most]


def _answered(
    document: Document, ids: Tensor, new_tokens: int, sampling: Sampling
) -> list[list[int]]:
    left = document.positions_left
    most = new_tokens if left is None else min(new_tokens, left - ids.shape[1])
    ends = ends_of(document.model, document.tokenizer)
    cache = document.cache.fork(copies=len(ids))
    found: list[list[int]] = [[] for _ in ids]
    over = [False] * len(ids)
    for tokens in next_tokens(document.model, cache, ids, sampling):
        for row, token in enumerate(tokens.flatten().tolist()):
            if token in ends:
                over[row] = True
            elif not over[row]:
                found[row].append(token)
                over[row] = len(found[row]) >= most
        if all(over):
            return found
    raise AssertionError  # tokens are without end
