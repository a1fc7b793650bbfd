"""RULER's variable tracking, "vt" (scripts/data/synthetic/variable_tracking.py)."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from kvsketch.evaluation.tasks.fitting import Draft, Lengths, largest
from kvsketch.evaluation.tasks.haystack import inserted, noise_lines

HOPS = 4
_EXAMPLE_TOKENS = 500
_TOKENS = 30


def chains(rng: random.Random, length: int, lengths: Lengths) -> Draft:
    """One value and ``HOPS`` further variables that get it from one another, in order, between
    lines of noise; one solved example of up to 500 tokens (and a quarter of the length) before it.
    Units: sentences of noise.

    The official prefix ends with a space; chat templates may cut it off, so it is not there.
    """
    values = rng.sample(range(10_000, 99_999), 2)
    first, wanted = _chain(rng, 3, values[0]), _chain(rng, 5, values[1])
    room = min(_EXAMPLE_TOKENS, length // 4)
    solved = " ".join(first.answers)

    def example(units: int) -> str:
        return f"{first.context(units)}{first.question} {solved}\n\n"

    units = largest(lambda units: lengths.text(example(units)), room) or 0
    head = example(units)
    return Draft(
        context=lambda units: head + wanted.context(units),
        question=wanted.question,
        answers=wanted.answers,
        max_new_tokens=_TOKENS,
    )


def _chain(rng: random.Random, letters: int, value: int) -> Draft:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names and name != "VAR":
            names.append(name)
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    shares = [rng.random() for _ in steps]

    def context(units: int) -> str:
        lines = inserted(noise_lines(units), steps, shares)
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following "
            "text.\n\n" + "\n".join(lines)
        )

    question = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:"
    )
    return Draft(context, question, tuple(names), _TOKENS)
