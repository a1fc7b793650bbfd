"""LongEval line retrieval: read or generate cases, ask a model, score its answers.

The task is that of "How Long Can Context Length of Open-Source LLMs truly Promise?" (Li et al.
2023; repository DachengLi1/LongChat, folder longeval): a record of lines, each with a number, then
the question for the number of one line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvsketch.budget import Budget
from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.answering import Answerer
from kvsketch.evaluation.encoding import EncodedCase, Encoder
from kvsketch.evaluation.results import Outcome, ResultStore, outcome_key
from kvsketch.evaluation.settings import Settings
from kvsketch.streaming import ALL_METHODS

EXACT = "exact"


@dataclass(frozen=True)
class Case:
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


@dataclass(frozen=True)
class Setup:
    """A method at a budget: slots per KV head (int) or a share of the tokens (float)."""

    method: str
    budget: int | float


def load_cases(path: Path) -> list[Case]:
    """Cases of one JSON-lines file in the official format.

    Only `prompt`, `expected_number` and `num_lines` are used.
    Raises `InputError` naming file and line of whatever is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"--cases {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--cases {path} is not UTF-8 text") from error
    cases = []
    # Not splitlines(): a record may hold characters that only Python takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            cases.append(_parse_case(line, f"{path}:{number}"))
    if not cases:
        raise InputError(f"--cases {path} holds no cases")
    return cases


def _parse_case(line: str, where: str) -> Case:
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
    return Case(prompt, expected, lines, where)


def load_case_files(paths: Sequence[Path], limit: int | None = None) -> list[Case]:
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


def make_cases(lines: Sequence[int], num_cases: int, seed: int) -> list[Case]:
    """`num_cases` generated cases for each record length in `lines`.

    Raises `InputError` if `wonderwords` is missing or a length is impossible.
    """
    from kvsketch.evaluation.longeval_cases import generate_cases

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


def make_setups(methods: Sequence[str], budgets: Sequence[int | float]) -> list[Setup]:
    """Every method at every budget; "exact" once, at 1.0.

    Raises `InputError` for an unknown method (naming the nearest) or an impossible budget.
    """
    if not methods:
        raise InputError(f"--methods is empty; allowed: {', '.join([EXACT, *ALL_METHODS])}")
    for method in methods:
        if method != EXACT and method not in ALL_METHODS:
            raise unknown_name("method", method, [EXACT, *ALL_METHODS])
    for budget in budgets:
        Budget(budget)  # raises
    compressed = [method for method in methods if method != EXACT]
    if compressed and not budgets:
        raise InputError("--budgets is empty; give shares such as 0.25 or slots such as 1024")
    setups = [Setup(EXACT, 1.0)] if EXACT in methods else []
    setups += [Setup(method, budget) for budget in budgets for method in compressed]
    return list({(s.method, repr(s.budget)): s for s in setups}.values())


def parse_budget(text: str) -> int | float:
    """ "0.25" is a share of the tokens, "1024" a number of slots per KV head.

    Raises `InputError` for anything else.
    """
    text = text.strip()
    try:
        budget: int | float = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError as error:
        raise InputError(
            f"budget={text!r} is not a number; allowed: a share in (0, 1] such as 0.25, "
            "or a number of slots per KV head such as 1024"
        ) from error
    return Budget(budget).value


def read_answer(text: str) -> int:
    """The benchmark's own rule: the last integer in the answer, or -1 where there is none."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else -1


def evaluate(
    answerer: Answerer,
    cases: Sequence[Case],
    encoded: Mapping[str, EncodedCase],
    setups: Sequence[Setup],
    store: ResultStore,
    on_done: Callable[[Outcome], None] | None = None,
) -> None:
    """Answers every case with every setup that `store` does not hold yet.

    All setups see a case before the next one starts, so an interrupted run compares them on the
    same cases. `encoded` is from `encode_cases`.
    """
    for batch in _batches(cases, answerer.settings.batch_size):
        for setup in setups:
            waiting = [c for c in batch if _key(c, setup) not in store]
            if not waiting:
                continue
            replies = answerer.answer([encoded[c.id] for c in waiting], setup.method, setup.budget)
            for case, reply in zip(waiting, replies, strict=True):
                outcome = Outcome(
                    case=case.id,
                    lines=case.lines,
                    method=setup.method,
                    budget=setup.budget,
                    expected=case.expected,
                    answer=read_answer(reply.text),
                    **reply.__dict__,
                )
                store.add(outcome)
                if on_done is not None:
                    on_done(outcome)


def encode_cases(encoder: Encoder, cases: Sequence[Case]) -> dict[str, EncodedCase]:
    """Token ids by case id. Raises `InputError` for a prompt that does not fit the model, or
    (question unseen) one without the official question."""
    return {case.id: encoder.encode(case.prompt, case.where) for case in cases}


def outcomes_of(
    store: ResultStore, cases: Iterable[Case], setups: Sequence[Setup]
) -> list[Outcome]:
    """What `store` holds of this run (a store may hold more), by length and then by setup."""
    by_lines = groupby(sorted(cases, key=lambda case: case.lines), key=lambda case: case.lines)
    return [
        store.outcomes[_key(case, setup)]
        for _, group in by_lines
        for members in [list(group)]
        for setup in setups
        for case in members
        if _key(case, setup) in store
    ]


def remaining(store: ResultStore, cases: Sequence[Case], setups: Sequence[Setup]) -> int:
    """How many (case, setup) pairs are still to be answered."""
    return sum(_key(case, setup) not in store for case in cases for setup in setups)


def run_settings(settings: Settings, model: str, fingerprint: str) -> Mapping[str, Any]:
    """What the outcomes depend on besides case, method and budget: the header of a store."""
    return {"model": model, "model_fingerprint": fingerprint, **settings.__dict__}


def _key(case: Case, setup: Setup) -> str:
    return outcome_key(case.id, setup.method, setup.budget)


def _batches(cases: Sequence[Case], size: int) -> Iterable[list[Case]]:
    """Up to `size` cases of one record length at a time, in order."""
    for _, group in groupby(cases, key=lambda case: case.lines):
        members = list(group)
        for start in range(0, len(members), size):
            yield members[start : start + size]
