"""RULER's needle-in-a-haystack subtasks (scripts/data/synthetic/niah.py)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from kvsketch.evaluation.runner.longeval_cases import make_key
from kvsketch.evaluation.tasks.fitting import Draft
from kvsketch.evaluation.tasks.haystack import Haystack, inserted, noise_lines

_DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent; official
_TOKENS = 128


@dataclass(frozen=True)
class Needles:
    """One row of RULER's scripts/synthetic.yaml.

    Attributes:
        haystack: "noise", "essay", or "needle" (other needles).
        keys, values: "words", "numbers" or "uuids".
        num_keys, num_values, num_queries: keys hidden, values of each, keys asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def single(self) -> bool:
        return self.num_queries * self.num_values == 1

    def needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}


def needles(kind: Needles, rng: random.Random, haystack: Callable[[], Haystack]) -> Draft:
    """Keys and values hidden in a haystack. Units: words of essays, sentences of noise, needles.

    Unlike the official script, essays start at a sentence drawn for the case, and keys and values
    never repeat.
    """
    new = _Fresh(rng)
    record = {
        new(kind.keys): [new(kind.values) for _ in range(kind.num_values)]
        for _ in range(kind.num_keys)
    }
    hidden = [kind.needle(key, value) for key, values in record.items() for value in values]
    rng.shuffle(hidden)
    asked = rng.sample(list(record), kind.num_queries)
    if kind.haystack == "essay":
        text = haystack()
        start = rng.choice(text.starts)
        depths = [depth / 100 for depth in sorted(rng.sample(_DEPTHS, len(hidden)))]

        def body(units: int) -> str:
            sentences = text.sentences(start, units)
            places = [int(len(sentences) * depth) for depth in depths]
            for place, needle in reversed(list(zip(places, hidden, strict=True))):
                sentences.insert(place, needle)
            return " ".join(sentences)

    else:
        shares = [rng.random() for _ in hidden]
        others: list[str] = []

        def body(units: int) -> str:
            while kind.haystack == "needle" and len(others) < units:
                others.append(kind.needle(new(kind.keys), new(kind.values)))
            lines = noise_lines(units) if kind.haystack == "noise" else others[:units]
            return "\n".join(inserted(lines, hidden, shares))

    head, question = question_about(kind, asked)
    return Draft(
        context=lambda units: head + body(units),
        question=question,
        answers=tuple(value for key in asked for value in record[key]),
        max_new_tokens=_TOKENS,
    )


def question_about(kind: Needles, asked: list[str]) -> tuple[str, str]:
    """What stands before the needles, and the question about these keys after them."""
    what = kind.values.removesuffix("s") if kind.single else kind.values
    some, be, be_all = ("A", "is", "is") if kind.single else ("Some", "are", "are all")
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    head = (
        f"{some} special magic {what} {be} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {what} afterwards.\n"
    )
    about = f"the special magic {what} for {query} mentioned in the provided text"
    return head, f"\nWhat {be_all} {about}? The{about[3:]} {be}"


class _Fresh:
    """Random keys and values, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: set[str] = set()

    def __call__(self, kind: str) -> str:
        while True:
            found = self._one(kind)
            if found not in self._seen:
                self._seen.add(found)
                return found

    def _one(self, kind: str) -> str:
        if kind == "words":
            return make_key(self._rng)
        if kind == "numbers":
            return str(self._rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
