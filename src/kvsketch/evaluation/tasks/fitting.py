"""Prompts of a wanted length in tokens: how long one is, and how much filling it takes.

A length counts the prompt and the longest answer together, as RULER's ``max_seq_length`` does, so
that a model with N positions can be asked at length N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError, at_least
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.evaluation.tasks.haystack import Haystack, load_haystack

_CHARACTERS = 4  # per token: what English has with most tokenizers


class Lengths:
    """Counts tokens; without a tokenizer, a token is four characters."""

    def __init__(self, tokenizer: Any | None = None) -> None:
        self.tokenizer = tokenizer

    def text(self, text: str, special: bool = False) -> int:
        """Tokens of a text, with the tokenizer's own first and last ones where ``special``."""
        if self.tokenizer is None:
            return math.ceil(len(text) / _CHARACTERS)
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return len(ids)

    def prompt(self, context: str, question: str) -> int:
        """Tokens of a prompt, in the tokenizer's chat template if it has one. Context and question
        are counted apart, as they are encoded where the question is unseen; together they are no
        more."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.text(context, special=True) + self.text(question)
        assert self.tokenizer is not None
        whole: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": context + question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        cut = max(whole.rfind(question), 0)
        return self.text(whole[:cut]) + self.text(whole[cut:])


@dataclass(frozen=True)
class Draft:
    """A case of any length.

    Attributes:
        context: the text with so many units of filling (words, sentences or lines). Everything
            else about it is fixed: answers do not depend on how much fits.
        question, answers, max_new_tokens: as of ``Case``.
        least: units without which it cannot be answered.
        most: units there are.
    """

    context: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    least: int = 0
    most: int | None = None


class Synthetic(Task):
    """Base class of needle and RULER.

    Args:
        lengths: tokens of prompt and answer together (``fitting``).
        num_cases: of each kind and length.
        haystack: a folder of .txt files (``load_haystack``).
        seed: of everything random.

    Raises:
        InputError: a length or num_cases below 1.
    """

    def __init__(
        self, lengths: Sequence[int], num_cases: int, haystack: Path | None, seed: int
    ) -> None:
        self.lengths = list(dict.fromkeys(at_least("length", n, 1) for n in lengths))
        self.num_cases = at_least("num_cases", num_cases, 1)
        self.folder = haystack
        self.seed = seed

    @cached_property
    def haystack(self) -> Haystack:
        return load_haystack(self.folder)

    def units(self, case: Case, draft: Draft, lengths: Lengths, limit: int) -> int:
        """``filled`` to the case's length, if the prompt fits into ``limit`` positions.

        Raises:
            InputError: naming the case.
        """
        length: int = case.group["length"]
        prompt = length - case.max_new_tokens
        try:
            if prompt > limit:
                raise InputError(
                    f"length={length} needs up to {prompt} tokens for the prompt, and the model "
                    f"(or --max-prompt-tokens) has room for {limit}"
                )
            return filled(draft, length, lengths)
        except InputError as error:
            raise InputError(f"{case.where}: {error}") from error


def largest(size: Callable[[int], int], limit: float, most: int | None = None) -> int | None:
    """The largest n in [0, most] with ``size(n) <= limit``, or None where there is none.

    ``size`` rises (nearly) evenly, so interpolation takes a few calls; where it does not rise
    everywhere, the n found still keeps within the limit.
    """
    low, at_low = 0, size(0)
    if at_low > limit:
        return None
    high, at_high = math.inf if most is None else most + 1, math.inf
    n, step = 64, 0
    while high - low > 1:
        n = int(min(max(n, low + 1), high - 1))
        found = size(n)
        if found <= limit:
            low, at_low = n, found
        else:
            high, at_high = n, found
        step += 1
        if math.isinf(at_high):  # how much there is says nothing: go by what is below
            n = low + 1 + math.ceil((limit - at_low) * low / max(at_low, 1))
        elif step % 4 == 3:  # uneven sizes must not make it crawl
            n = int(low + high) // 2
        else:
            n = low + int((limit - at_low) * (high - low) / (at_high - at_low))
    return low


def filled(draft: Draft, length: int, lengths: Lengths) -> int:
    """Units with which a draft's prompt and answer come closest to ``length`` tokens from below.

    Raises:
        InputError: a length too short for what is asked, or longer than there is filling for.
    """
    room = length - draft.max_new_tokens

    def size(units: int) -> int:
        return lengths.prompt(draft.context(draft.least + units), draft.question)

    most = None if draft.most is None else draft.most - draft.least
    units = largest(size, room, most)
    if units is None:
        raise InputError(
            f"length={length} is too short: this takes at least {size(0)} tokens, and "
            f"{draft.max_new_tokens} for the answer"
        )
    if units == most:
        raise InputError(
            f"length={length} is too long: the available filling text makes {size(units)} tokens"
        )
    return draft.least + units


def roughly_filled(draft: Draft, length: int) -> int:
    """As ``filled`` before a tokenizer is known; what cannot be is left to ``filled``."""
    try:
        return filled(draft, length, Lengths())
    except InputError:
        return draft.least
