"""The contents of results stores, grouped into runs: answers that can be compared with each
other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError
from kvsketch.evaluation.report.report import group_of, in_words
from kvsketch.evaluation.runner.aggregates import aggregate
from kvsketch.evaluation.runner.setups import EXACT, Setup
from kvsketch.evaluation.runner.store import Record, Store

#: what distinguishes answers within a run; everything else in an identity belongs to the run
_WITHIN = {"task", "case", "max_new_tokens", *(x.name for x in fields(Setup))}
#: families whose data sets are also looked at together
_FAMILIES = ("longbench", "ruler")


@dataclass(frozen=True)
class Run:
    """Answers of one model in one protocol with one version.

    Attributes:
        number: 1, 2, ... in order of first appearance.
        common: what all answers share: model, model_fingerprint, kvsketch, question, ...
        records: the answers.
        rows: ``rows_of`` them, by task, group and setup.
        apart: what tells it from others of the same model and question, in words.
    """

    number: int
    common: Mapping[str, Any]
    records: Sequence[Record]
    rows: Sequence[Mapping[str, Any]]
    apart: str = ""

    @property
    def model(self) -> str:
        """The model's name: of a folder only the last part, so that a page shows no local paths."""
        return without_folders(str(self.common["model"]))

    @property
    def title(self) -> str:
        more = f", {self.apart}" if self.apart else ""
        return f"{self.model}, question {self.common['question']}{more}"

    @property
    def made(self) -> dict[str, list[str]]:
        """How the answers were made, where the store says so: date, versions, hardware; of each all
        values, sorted."""
        found: dict[str, set[str]] = {}
        for record in self.records:
            made = record.result.get("made")
            for name, value in made.items() if isinstance(made, Mapping) else ():
                found.setdefault(clean(str(name)), set()).add(clean(str(value)))
        return {name: sorted(values) for name, values in found.items()}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in stores; a case that several hold is taken from the last.

    Raises:
        InputError: no store, one that cannot be read, is damaged or holds nothing.
    """
    if not paths:
        raise InputError("no results store is given: name files that kvsketch eval --out wrote")
    found: dict[str, Record] = {}
    for path in paths:
        store = Store(path, write=False)
        if not len(store):
            raise InputError(f"{path} is empty: kvsketch eval --out {path} fills it")
        for record in store:
            try:
                rows_of([record])
                _ = [record.identity[name] for name in ("kvsketch", "model_fingerprint")]
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"{path}: record {record.key} cannot be read: {type(error).__name__} {error}; "
                    "give a store that kvsketch eval --out wrote"
                ) from error
            found[record.key] = record
    groups: dict[str, list[Record]] = {}
    for record in found.values():
        groups.setdefault(json.dumps(_common(record), sort_keys=True), []).append(record)
    commons = [_common(records[0]) for records in groups.values()]
    return [
        Run(number, common, records, rows_of(records), _apart(common, commons))
        for number, (common, records) in enumerate(
            zip(commons, groups.values(), strict=True), start=1
        )
    ]


def _apart(common: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """What tells a run from those whose titles would be the same."""

    def name(run: Mapping[str, Any]) -> tuple[str, str]:
        return without_folders(str(run["model"])), str(run["question"])

    same = [run for run in others if name(run) == name(common)]
    keys = dict.fromkeys(key for run in same for key in run)
    differing = [
        key for key in keys if key != "model" and len({repr(run.get(key)) for run in same}) > 1
    ]
    return ", ".join(f"{key.replace('_', ' ')} {common.get(key)}" for key in differing)


def without_folders(name: str) -> str:
    """A model's name without the folders it lies in; an id of the hub as it is."""
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..", "~")]
    path = name.startswith(("/", ".", "~", "\\")) or len(parts) > 2 or ":" in name[:2]
    return parts[-1] if path and parts else name


def run_of(records: Sequence[Record]) -> Run:
    """Answers of one sweep, at least one, as a run."""
    return Run(1, _common(records[0]), records, rows_of(records))


def _common(record: Record) -> dict[str, Any]:
    return {k: clean(v) for k, v in record.identity.items() if k not in _WITHIN}


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """``sweep.aggregate``'s rows, with

    - "group": what lies between task and question there, and "title": it and the task, in words;
    - "kept": bytes over the exact cache's; "goal": what it may keep, in words ("25%");
    - "series": method, and whether its points are tolerances.
    """
    rows = []
    for row in aggregate(records):
        row = {clean(key): clean(value) for key, value in row.items()}
        row["group"], row["title"] = group_of(row), in_words(row)
        row["kept"] = row["kv_bytes"] / row["exact_kv_bytes"]
        row["goal"] = _goal(row)
        row["series"] = row["method"] + (" (tolerance)" if row["tolerance"] is not None else "")
        rows.append(row)
    return rows


def pooled(
    records: Sequence[Record], without: Collection[str] = (), by_family: bool = False
) -> list[dict[str, Any]]:
    """Rows over all answers that differ only in some entries of their group.

    Args:
        without: which; all with ``by_family``.
        by_family: pool the data sets of LongBench, and RULER's subtasks, too.
    """

    def kept(record: Record) -> Record:
        task, group = str(record.identity["task"]), record.result["group"]
        left = {} if by_family else {k: v for k, v in group.items() if k not in without}
        identity = {**record.identity, "task": family(task) if by_family else task}
        return Record(identity, {**record.result, "group": left})

    return rows_of([kept(record) for record in records])


def family(task: str) -> str:
    """ "longbench" for "longbench/multi_news"; other tasks stand for themselves."""
    name = task.partition("/")[0]
    return name if name in _FAMILIES else task


def is_exact(row: Mapping[str, Any]) -> bool:
    return bool(row["method"] == EXACT)


def goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What methods may keep, from most bytes to least; without the exact cache."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if not is_exact(row):
            found.setdefault(row["goal"], []).append(row["kept"])
    return sorted(found, key=lambda goal: -sum(found[goal]) / len(found[goal]))


def grouped(
    rows: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[Mapping[str, Any]]]:
    """Rows by a key, in order of first appearance."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _goal(row: Mapping[str, Any]) -> str:
    if is_exact(row):
        return EXACT
    if row["tolerance"] is not None:
        return f"tolerance {row['tolerance']:g}"
    budget = row["budget"]
    return f"{budget:,} slots" if isinstance(budget, int) else f"{100 * budget:g}%"


def clean(value: Any) -> Any:
    """Text without characters that are invalid in XML or unreadable."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    return value
