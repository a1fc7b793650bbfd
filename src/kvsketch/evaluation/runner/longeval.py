"""LongEval line retrieval: read or generate cases, read answers.

The task is that of "How Long Can Context Length of Open-Source LLMs truly Promise?" (Li et al.
2023; repository DachengLi1/LongChat, folder longeval): a record of lines, each with a number, then
the question for the number of one line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsketch.errors import InputError
from kvsketch.evaluation.runner.files import read_text

QUESTION_MARK = "\nNow the record is over."  # where the question starts in every official prompt


@dataclass(frozen=True)
class LinesCase:
    """One question over one record. `where` says where it came from, for messages."""

    prompt: str
    expected: int
    lines: int
    where: str

    @property
    def id(self) -> str:
        """The same for the same prompt and answer, whatever file they came in."""
        text = f"{self.expected}\n{self.prompt}"
        return f"{self.lines}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def load_cases(path: Path) -> list[LinesCase]:
    """Cases of one JSON-lines file in the official format.

    Only `prompt`, `expected_number` and `num_lines` are used.
    Raises `InputError` naming file and line of whatever is wrong.
    """
    text = read_text(path, "--cases")
    cases = []
    # Not splitlines(): a record may hold characters that only Python takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            cases.append(_parse_case(line, f"{path}:{number}"))
    if not cases:
        raise InputError(f"--cases {path} holds no cases")
    return cases


def _parse_case(line: str, where: str) -> LinesCase:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"--cases {where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"--cases {where} must be a JSON object, got {type(record).__name__}")
    missing = [n for n in ("prompt", "expected_number", "num_lines") if n not in record]
    if missing:
        raise InputError(f"--cases {where} lacks {', '.join(missing)}")
    prompt, expected, lines = record["prompt"], record["expected_number"], record["num_lines"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"--cases {where}: prompt must be text, got {prompt!r}")
    for name, value, least in (("expected_number", expected, 0), ("num_lines", lines, 1)):
        if type(value) is not int or value < least:
            raise InputError(f"--cases {where}: {name} must be an int >= {least}, got {value!r}")
    return LinesCase(prompt, expected, lines, where)


def load_case_files(paths: Sequence[Path], limit: int | None = None) -> list[LinesCase]:
    """Cases of several files, the first `limit` of each.

    Raises `InputError` as `load_cases` does, and for a case that is there twice: it would count
    twice without adding evidence.
    """
    seen: dict[str, str] = {}
    cases = []
    for path in paths:
        for case in load_cases(path)[:limit]:
            if case.id in seen:
                raise InputError(f"--cases {case.where} repeats the case at {seen[case.id]}")
            seen[case.id] = case.where
            cases.append(case)
    return cases


def make_cases(lines: Sequence[int], num_cases: int, seed: int) -> list[LinesCase]:
    """`num_cases` generated cases for each record length in `lines`.

    Raises `InputError` if `wonderwords` is missing or a length is impossible.
    """
    from kvsketch.evaluation.runner.longeval_cases import generate_cases

    cases = []
    for count in lines:
        try:
            records = generate_cases(count, num_cases, seed)
        except ImportError as error:
            raise InputError(f"{error}; or give case files with --cases") from error
        except ValueError as error:
            raise InputError(f"--lines {count}: {error}") from error
        for index, record in enumerate(records):
            where = f"generated {count} lines, seed {seed}, case {index}"
            cases.append(_parse_case(json.dumps(record), where))
    return cases


def read_answer(text: str) -> int:
    """The benchmark's own rule: the last integer in the answer, or -1 where there is none."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else -1
