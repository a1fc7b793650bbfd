"""LongEval line-retrieval cases in the official format, generated from a seed.

The published files hold 200 to 400 lines; this module makes records of any
length with the same words (`wonderwords`), instruction and question.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with "
    "'line <line index>' and contains a '<REGISTER_CONTENT>' at the end of the line as a "
    "numerical value. For each line index, memorize its corresponding <REGISTER_CONTENT>. "
    "At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
QUESTION = (
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? "
    "I need the number. "
)
ANSWER = "The <REGISTER_CONTENT> in line {key} is <{number}>."
MAX_NUMBER = 50_000


@lru_cache(maxsize=1)
def word_lists() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns a key is made of, sorted so that a seed means the same everywhere."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise ImportError(
            "generating LongEval cases needs the word lists of `wonderwords`: "
            "pip install wonderwords"
        ) from error
    source = RandomWord()
    adjectives = {word.strip() for word in source.filter(include_categories=["adjectives"])}
    nouns = {word.strip() for word in source.filter(include_categories=["nouns"])}
    return tuple(sorted(adjectives - {""})), tuple(sorted(nouns - {""}))


def make_key(rng: random.Random) -> str:
    """One line index such as `torpid-kid` (some words carry hyphens of their own)."""
    adjectives, nouns = word_lists()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def make_record(num_lines: int, rng: random.Random) -> dict[str, int]:
    """`num_lines` unique keys, each with its number, in the order of the record."""
    adjectives, nouns = word_lists()
    # Half of all pairs, so that drawing unique keys stays quick.
    if not 1 <= num_lines <= len(adjectives) * len(nouns) // 2:
        raise ValueError(f"num_lines must be a positive number of lines, got {num_lines}")
    record: dict[str, int] = {}
    while len(record) < num_lines:
        record.setdefault(make_key(rng), rng.randint(1, MAX_NUMBER))
    return record


def format_line(key: str, number: int) -> str:
    return f"line {key}: REGISTER_CONTENT is <{number}>\n"


def format_prompt(record: dict[str, int], key: str) -> str:
    """The official prompt that asks for the number of `key`."""
    lines = "".join(format_line(*item) for item in record.items())
    return HEADER + lines + QUESTION.format(key=key)


def generate_cases(num_lines: int, num_cases: int, seed: int) -> list[dict[str, Any]]:
    """Cases with the fields of the official files.

    `token_size` and `prompt_length` depend on a tokenizer and are -1 (unknown) here.
    """
    rng = random.Random(f"longeval/{seed}/{num_lines}")
    cases = []
    for _ in range(num_cases):
        record = make_record(num_lines, rng)
        index = rng.randrange(num_lines)
        key, number = list(record.items())[index]
        cases.append(
            {
                "random_idx": [key, index],
                "expected_number": number,
                "num_lines": num_lines,
                "token_size": -1,
                "correct_line": format_line(key, number),
                "prompt": format_prompt(record, key),
                "prompt_length": -1,
            }
        )
    return cases
