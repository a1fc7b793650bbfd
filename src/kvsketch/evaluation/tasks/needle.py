"""Needle in a haystack: one sentence in a long text, by length and depth.

Greg Kamradt's test (github gkamradt/LLMTest_NeedleInAHaystack) as BalanceKV's authors run it
(github ksheth96/BalanceKV, run_needle_in_haystack.py): their needle, question, 30 answer tokens and
recall. Different here: the haystack starts elsewhere in every case, so that cases are independent;
white space is single; the prompt has no literal ``<|im_start|>``, which some models take for more
than text.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.runner.longeval import read_answer
from kvsketch.evaluation.runner.longeval_cases import (
    HEADER,
    MAX_NUMBER,
    QUESTION,
    format_line,
    make_key,
)
from kvsketch.evaluation.tasks.base import Case
from kvsketch.evaluation.tasks.fitting import (
    Draft,
    Lengths,
    Synthetic,
    largest,
    roughly_filled,
)

_LINE = "line {key}: REGISTER_CONTENT is <{value}>\n"
_BEFORE = "This is a very long story book: <book> "
_AFTER = " </book>.\n Based on the content of the book, Question: {question}\nAnswer:"


@dataclass(frozen=True)
class _Form:
    """The sentence (with ``{key}`` and ``{value}``), what comes before the haystack, the question
    after it, and the answer's length in tokens. ``lines``: the haystack is other LongEval lines."""

    needle: str
    before: str
    question: str
    new_tokens: int = 30
    lines: bool = False


FORMS: Mapping[str, _Form] = {
    "sandwich": _Form(
        "\nThe best thing to do in San Francisco is {value}\n",
        _BEFORE,
        _AFTER.format(question="The best thing to do in San Francisco is: "),
    ),
    "number": _Form(
        "\nThe magic number for {key} is {value}.\n",
        _BEFORE,
        _AFTER.format(question="What is the magic number for {key}?"),
    ),
    "line": _Form(_LINE, HEADER, QUESTION.rstrip(), 32, lines=True),
}
SANDWICH = "eat a sandwich and sit in Dolores Park on a sunny day."


class Needle(Synthetic):
    """One needle per case, at every depth of every length.

    Args:
        lengths: tokens of prompt and answer together (``fitting``).
        depths: share of the haystack's tokens before the needle, in [0, 1]; the needle comes after
            the last sentence that ends there, and at 1 after everything.
        num_cases: per length and depth.
        form: what is hidden. "sandwich": the usual sentence, which models may know. "number": a
            random number under a random key. "line": a LongEval line among others, for the packaged
            model, which knows nothing else.
        haystack: a folder of .txt files (``load_haystack``); not for "line".
        seed: of keys, numbers and where the haystack starts.
        limit: the first so many cases of each length; None: all.

    Raises:
        InputError: a length below 1, a depth outside [0, 1], an unknown form.
    """

    name = "needle"

    def __init__(
        self,
        lengths: Sequence[int],
        depths: Sequence[float],
        num_cases: int = 1,
        form: str = "sandwich",
        haystack: Path | None = None,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        super().__init__(lengths, num_cases, haystack, seed)
        self.limit = limit
        self.depths = list(dict.fromkeys(_checked(depth) for depth in depths))
        if form not in FORMS:
            raise unknown_name("form", form, FORMS)
        self.form = form

    def cases(self) -> list[Case]:
        """By length, depth and number. Until ``fitted``, a token is taken for four characters."""
        numbers = list(product(self.depths, range(self.num_cases)))[: self.limit]
        return [self._draw(length, *number) for length in self.lengths for number in numbers]

    def fitted(self, case: Case, tokenizer: Any, limit: int) -> Case:
        """As long as its length says, by this tokenizer, and the needle at its depth.

        Raises:
            InputError: a length too short for the needle, or beyond the limit.
        """
        length = case.group["length"]
        lengths = Lengths(tokenizer)
        units = self.units(case, self._draft(case), lengths, limit)
        while True:  # tokens at the seams of the needle differ from place to place
            context = self._context(case, units, lengths)
            if lengths.prompt(context, case.question) <= length - case.max_new_tokens or not units:
                return dataclasses.replace(case, context=context)
            units -= 1

    def score(self, case: Case, text: str) -> float:
        """Of the answer's first line. "sandwich": recall as in BalanceKV's script, the share of the
        answer's distinct words (lower case, cut at white space) that are in it; an empty first line
        scores 0, because generation ends there. Else 1 if its last integer is the number."""
        if self.form == "sandwich":
            wanted = set(case.answers[0].lower().split())
            return len(wanted & set(text.split("\n", 1)[0].lower().split())) / len(wanted)
        return float(read_answer(text.strip().split("\n", 1)[0]) == int(case.answers[0]))

    def _draw(self, length: int, depth: float, index: int) -> Case:
        where = f"needle/{self.form} length={length} depth={depth} seed={self.seed} case {index}"
        rng = random.Random(where)
        form = FORMS[self.form]
        if self.form == "sandwich":
            key, value = "", SANDWICH
        else:
            key, value = make_key(rng), str(rng.randint(10_000, MAX_NUMBER - 1))
        case = Case(
            task=f"{self.name}/{self.form}",
            context="",
            question=form.question.format(key=key),
            answers=(value,),
            max_new_tokens=form.new_tokens,
            group={"length": length, "depth": depth},
            details={
                "haystack": "lines" if form.lines else self.haystack.name,
                "start": 0 if form.lines else rng.choice(self.haystack.starts),
                "key": key,
                "needle": form.needle.format(key=key, value=value),
            },
            where=where,
        )
        units = roughly_filled(self._draft(case), length)
        return dataclasses.replace(case, context=self._context(case, units, Lengths()))

    def _parts(self, case: Case, units: int) -> list[str]:
        """Sentences of so many words, or so many lines: between two of them goes the needle."""
        if not FORMS[self.form].lines:
            return self.haystack.sentences(case.details["start"], units)
        rng = random.Random(f"{case.where}/lines")
        record = {case.details["key"]: 0}
        while len(record) <= units:
            record.setdefault(make_key(rng), rng.randint(1, MAX_NUMBER))
        return [format_line(*line) for line in list(record.items())[1:]]

    def _draft(self, case: Case) -> Draft:
        """Its length, wherever the needle is."""
        form = FORMS[self.form]

        def context(units: int) -> str:
            return f"{form.before}{self._joined(self._parts(case, units))}{case.details['needle']}"

        return Draft(context, case.question, case.answers, case.max_new_tokens)

    def _context(self, case: Case, units: int, lengths: Lengths) -> str:
        parts = self._parts(case, units)
        depth, cut = case.group["depth"], len(parts)
        if depth < 1 and parts:
            share = depth * lengths.text(self._joined(parts))
            cut = largest(lambda n: lengths.text(self._joined(parts[:n])), share, cut - 1) or 0
        before, after = self._joined(parts[:cut]), self._joined(parts[cut:])
        return f"{FORMS[self.form].before}{before}{case.details['needle']}{after}"

    def _joined(self, parts: Sequence[str]) -> str:
        return ("" if FORMS[self.form].lines else " ").join(parts)


def _checked(depth: float) -> float:
    if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
        raise InputError(f"depth={depth!r} must be a number in [0, 1]")
    return float(depth)
