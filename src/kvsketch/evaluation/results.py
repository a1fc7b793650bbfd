"""What an evaluation measured: one record per answered case, kept in a file that can be resumed.

The file is JSON lines. Its first line holds the settings of the run; every further line is one
finished case. Lines are flushed as they are written, so an interrupted run loses at most the
case it was working on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsketch.errors import InputError, KVSketchError

FORMAT = "kvsketch-longeval-1"
_Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Outcome:
    """One case, answered once with one method and budget.

    Bytes and seconds are per case: those of a batch are divided by its rows.
    `budget` is slots per KV head (int) or a fraction of the tokens (float).
    """

    case: str
    lines: int
    method: str
    budget: int | float
    expected: int
    answer: int
    text: str
    prompt_tokens: int
    new_tokens: int
    slots: float  # kept per KV head, mean, when the first answer token is out
    kv_bytes: float  # at the same moment, from live tensors
    exact_kv_bytes: float  # what an exact cache holds at the same moment
    final_kv_bytes: float  # the same two after the last token
    final_exact_kv_bytes: float
    peak_kv_bytes: float
    prefill_seconds: float
    decode_tokens: int  # tokens made after the first one, which the prefill gives
    decode_seconds: float

    @property
    def correct(self) -> bool:
        return self.answer == self.expected

    @property
    def key(self) -> str:
        return outcome_key(self.case, self.method, self.budget)


def outcome_key(case: str, method: str, budget: int | float) -> str:
    """Identity of an outcome. `repr` keeps 1 (one slot) apart from 1.0 (everything)."""
    return f"{case}|{method}|{budget!r}"


def wilson_interval(correct: int, cases: int) -> tuple[float, float]:
    """95% Wilson score interval of a share: honest near 0 and 1, where few cases end up.

    Raises `InputError` unless 0 <= correct <= cases and cases >= 1.
    """
    if cases < 1 or not 0 <= correct <= cases:
        raise InputError(f"need 0 <= correct <= cases and cases >= 1, got {correct} of {cases}")
    share, z2 = correct / cases, _Z95**2
    centre = (share + z2 / (2 * cases)) / (1 + z2 / cases)
    spread = share * (1 - share) / cases + z2 / (4 * cases**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / cases)
    # At 0 and at `cases` one end is exact; rounding would leave it a hair off.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == cases else centre + half
    return low, high


def aggregate(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row per (lines, method, budget), in order of first appearance."""
    groups: dict[tuple[int, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.lines, outcome.method, repr(outcome.budget))
        groups.setdefault(key, []).append(outcome)
    return [_row(group) for group in groups.values()]


def _row(group: list[Outcome]) -> dict[str, Any]:
    count = len(group)
    correct = sum(outcome.correct for outcome in group)

    def mean(field: str) -> float:
        return float(sum(getattr(outcome, field) for outcome in group)) / count

    def rate(tokens: str, seconds: str) -> float | None:
        time = sum(getattr(outcome, seconds) for outcome in group)
        made = sum(getattr(outcome, tokens) for outcome in group)
        return round(made / time, 2) if time > 0 and made > 0 else None

    return {
        "method": group[0].method,
        "budget": group[0].budget,
        "lines": group[0].lines,
        "accuracy": correct / count,
        "ci95": [round(end, 4) for end in wilson_interval(correct, count)],
        "cases": count,
        "prompt_tokens": round(mean("prompt_tokens"), 1),
        "slots": round(mean("slots"), 2),
        "kv_bytes": round(mean("kv_bytes")),
        "exact_kv_bytes": round(mean("exact_kv_bytes")),
        "final_kv_bytes": round(mean("final_kv_bytes")),
        "final_exact_kv_bytes": round(mean("final_exact_kv_bytes")),
        "peak_kv_bytes": round(mean("peak_kv_bytes")),
        "prefill_tokens_per_s": rate("prompt_tokens", "prefill_seconds"),
        "decode_tokens_per_s": rate("decode_tokens", "decode_seconds"),
    }


class ResultStore:
    """Outcomes in memory and, with a path, in a JSON-lines file that a later run continues.

    Raises `InputError` if the file belongs to a run with other settings, is not such a file, or
    cannot be written; nothing of an existing file is lost in either case.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        self._file = None
        if path is None:
            return
        # Through JSON once, so that what is compared is what a file can hold.
        wanted = json.loads(json.dumps(dict(settings)))
        end = self._load(path, wanted)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if end is not None:
                self._file.truncate(end)
        except OSError as error:
            raise InputError(f"--out {path} cannot be written: {_reason(error)}") from error
        if not end:
            self._write({"format": FORMAT, "settings": wanted})

    def _load(self, path: Path, wanted: dict[str, Any]) -> int | None:
        """Reads what is there. Returns where its last whole line ends (None: no file)."""
        if not path.is_file():  # also keeps devices such as /dev/full from being read
            return None
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise InputError(f"--out {path} cannot be read: {_reason(error)}") from error
        # A killed run may leave half a line; everything before it is good.
        end = raw.rfind(b"\n") + 1
        lines = raw[:end].decode("utf-8", errors="replace").splitlines()
        if not lines:
            if raw:
                raise _foreign(path)
            return 0
        header = _parse(lines[0])
        if header is None or header.get("format") != FORMAT:
            raise _foreign(path)
        _check_settings(path, header.get("settings") or {}, wanted)
        names = {field.name for field in fields(Outcome)}
        for number, line in enumerate(lines[1:], start=2):
            record = _parse(line)
            if record is None or set(record) != names:
                raise InputError(
                    f"--out {path}:{number} is not a finished case; remove that line, "
                    "or give another file"
                )
            outcome = Outcome(**record)
            self.outcomes[outcome.key] = outcome
        return end

    def __contains__(self, key: str) -> bool:
        return key in self.outcomes

    def add(self, outcome: Outcome) -> None:
        """Keeps `outcome`. Raises `KVSketchError` if the file cannot take it (disk full)."""
        self._write(asdict(outcome))
        self.outcomes[outcome.key] = outcome

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            kept = len(self.outcomes)
            self.close()
            raise KVSketchError(
                f"--out {self.path} cannot be written: {_reason(error)}; the {kept} finished "
                "cases in it are kept: make room and run the same command again"
            ) from error

    def close(self) -> None:
        """Closes the file; what was added stays readable in memory."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the write that failed has been reported already
                file.close()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _foreign(path: Path) -> InputError:
    return InputError(
        f"--out {path} exists and is not a results file of this command; give another file"
    )


def _check_settings(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in sorted(set(found) | set(wanted)):
        if found.get(name) != wanted.get(name):
            raise InputError(
                f"--out {path} holds a run with {name} = {found.get(name)!r}, but this run has "
                f"{name} = {wanted.get(name)!r}; use the same settings or give another file"
            )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
