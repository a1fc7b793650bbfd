"""RULER's word counting: "cwe" and "fwe" (scripts/data/synthetic/common_words_extraction.py and
freq_words_extraction.py)."""

from __future__ import annotations

import math
import random
import string
from functools import lru_cache

from kvsketch.evaluation.tasks.fitting import Draft

COMMON = 10
_LONG = 4096  # tokens; below, the official script repeats words less often
_CODED_LETTERS = 6
_ZETA_2 = math.pi**2 / 6


@lru_cache(maxsize=1)
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs of `wonderwords`, sorted."""
    from wonderwords import RandomWord

    source = RandomWord()
    kinds = ("nouns", "adjectives", "verbs")
    found = {word.strip() for kind in kinds for word in source.filter(include_categories=[kind])}
    return tuple(sorted(found - {""}))


def common_words(rng: random.Random, length: int) -> Draft:
    """ "cwe": ten words thirty times each among words three times each (six and one below 4096
    tokens), one solved example before it. Units: uncommon words.

    The official script goes on with a second word list where this one is used up.
    """
    example_words, example_repeats = (40, (10, 3)) if length >= _LONG else (20, (3, 1))
    repeats = (30, 3) if length >= _LONG else (6, 1)
    drawn = rng.sample(all_words(), example_words)
    words = rng.sample(all_words(), len(all_words()))
    order = rng.random()
    question = (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words "
        "that appear most often in the list are:"
    )
    solved = " ".join(f"{i}. {word}" for i, word in enumerate(drawn[:COMMON], start=1))
    head = f"{_word_list(drawn, example_repeats, order)}{question} {solved}\n"
    return Draft(
        context=lambda units: head + _word_list(words[: COMMON + units], repeats, order),
        question=question,
        answers=tuple(words[:COMMON]),
        max_new_tokens=120,
        most=len(words) - COMMON,
    )


def _word_list(words: list[str], repeats: tuple[int, int], order: float) -> str:
    entries = words[:COMMON] * repeats[0] + words[COMMON:] * repeats[1]
    random.Random(order).shuffle(entries)
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
        + " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
    )


def frequent_words(rng: random.Random, length: int) -> Draft:
    """ "fwe": of n coded words, n k^-2 / zeta(2) are the one of rank k. Rank 1 is dots, ranks 2
    to 4 are asked for. Units: words."""
    new_tokens = 50
    names: dict[str, None] = {}
    while len(names) < max((length - new_tokens) // 50, 5):
        names["".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))] = None
    ranked = ["...", *list(names)[1:]]
    order = rng.random()

    def context(units: int) -> str:
        counts = [int(units / (rank**2 * _ZETA_2)) for rank in range(1, len(ranked) + 1)]
        words = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        random.Random(order).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}"
        )

    return Draft(
        context=context,
        question=(
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are "
            "the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:"
        ),
        answers=tuple(ranked[1:4]),
        max_new_tokens=new_tokens,
        least=math.ceil(32 * _ZETA_2),  # from here on rank 5 is rarer than rank 4
    )
