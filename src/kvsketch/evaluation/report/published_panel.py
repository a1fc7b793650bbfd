"""The papers' tables, with our results next to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvsketch.evaluation.report.parts import Grid
from kvsketch.evaluation.report.published import (
    AVERAGE,
    BALANCEKV_TABLE_1,
    CLUSTERGEN_TABLE_2,
    SAME_AS_SUBGEN_TABLE_1,
    SUBGEN_TABLE_1,
)
from kvsketch.evaluation.runner.presets import PRESETS, Preset
from kvsketch.evaluation.runner.runs import Run, grouped, pooled
from kvsketch.evaluation.runner.scales import scale_of
from kvsketch.evaluation.runner.setups import EXACT

Row = Mapping[str, Any]

#: The two sets of cases of LongBench: the name of the task here, and the name in papers.
_SPLITS = {"longbench_e": "LongBench-E", "longbench": "LongBench"}
#: Shown if the paper has a number and the run does not.
NOT_RUN = "not run"
_BETTER = ", of several windows the better one"
_HEADER = ("method", "paper", "paper kept", "ours [95%]", "ours kept", "our cases")


def beside(run: Run) -> list[Grid]:
    """The published tables that have a task and a method (other than exact) in common with the run.
    For a preset, its whole table, in which numbers that are missing from the run are marked."""
    preset = PRESETS.get(str(run.common.get("preset")))
    if preset is not None:
        whole = _subgen if preset.task == "longeval" else partial(_longbench, table=preset.table)
        return [whole(run, preset=preset)]
    found = [_subgen(run)]
    # The set of cases that the paper uses comes first.
    found += [_longbench(run, BALANCEKV_TABLE_1, split) for split in _SPLITS]
    found += [_longbench(run, CLUSTERGEN_TABLE_2, split) for split in reversed(_SPLITS)]
    return [grid for grid in found if any(line[1] != EXACT for line in grid.rows)]


def _subgen(run: Run, preset: Preset | None = None) -> Grid:
    """LongEval by number of lines. The paper gives the size of the cache in GB."""
    rows = [r for r in run.rows if r["task"] == "longeval" and set(r["group"]) == {"lines"}]
    lines = []
    for length, theirs in SUBGEN_TABLE_1["results"].items():
        mine = [row for row in rows if str(row["group"]["lines"]) == length]
        for method, (gigabytes, accuracy) in theirs.items():
            share = gigabytes / theirs[EXACT][0]
            row = _nearest(mine, method, "kept", share)
            printed = (f"{accuracy:.2f}", f"{share:.0%}")
            if row:
                ours = (_score(row, "longeval"), f"{row['kept']:.0%}", str(row["cases"]))
                lines.append([length, row["method"], *printed, *ours])
            elif preset is not None:
                lines.append([length, method, *printed, NOT_RUN, "", ""])
    return Grid(
        "Beside the SubGen paper",
        ("lines", *_HEADER),
        lines,
        f"{SUBGEN_TABLE_1['source']} (the same numbers: {SAME_AS_SUBGEN_TABLE_1}): "
        f"{SUBGEN_TABLE_1['model']}, {SUBGEN_TABLE_1['cases']} cases, question seen; kcenter is "
        f"the paper's SubGen. Ours: {run.title}, the budget that keeps most nearly the same share"
        f"{_BETTER}. The models differ: compare the order.",
    )


def _longbench(
    run: Run, table: Mapping[str, Any], split: str = "", preset: Preset | None = None
) -> Grid:
    """LongBench by task type. The paper gives the size of the cache as a share or in slots.

    Args:
        split: the task whose cases are used, a name in ``_SPLITS``. Not used with a preset, for
            which all tasks in ``_SPLITS`` count.
    """
    splits = [split] if preset is None else list(_SPLITS)
    rows = [row for one in splits for row in data_sets(run, one)]
    there = {row["group"]["dataset"] for row in rows}
    split = split or (preset.task if preset else "")
    ours = _by_type(rows, table)
    unit = "slots" if "slots" in table else "kept"
    lines = []
    for kind, theirs in table["results"].items():
        for method, score in theirs.items():
            row = _nearest(ours.get(kind, []), method, unit, table[unit])
            whole = method == EXACT
            printed = (f"{score:.2f}", f"{1:.0%}" if whole else _amount(table[unit], unit))
            if row:
                mine = (_score(row, split), _kept(row, unit), str(row["cases"]))
                lines.append([kind, row["method"], *printed, *mine])
            elif preset is not None:
                names = set(table["datasets"].get(kind, ()))
                lacks = sorted(names - there) if names & there else []
                lines.append([kind, method, *printed, _without(lacks), "", ""])
    same = "number of slots" if unit == "slots" else "share"
    together = "sum" if table["sums"] else "mean"
    return Grid(
        f"Beside the {table['name']} paper, {_SPLITS[split]}",
        ("task type", *_HEADER),
        lines,
        f"{table['source']}: {table['model']}, {table['protocol']}. Ours: {run.title}, "
        f"{_SPLITS[split]}, all lengths together, the {together} over the same data sets where all "
        f"of them were run, the budget that keeps most nearly the same {same}{_BETTER}. The models "
        f"differ: compare the order. {table.get('remark', '')}".rstrip(),
    )


def _nearest(rows: Iterable[Row], method: str, unit: str, goal: float) -> dict[str, Any] | None:
    """The row of a method whose size is nearest to ``goal``. If it was run with several windows at
    that size, the one with the best score, with the window in its name."""
    windows: dict[str, Row] = {}
    for row in rows:
        name = row["method"]
        if name.partition(":")[0] != method or not set(name).isdisjoint("@+"):
            continue
        known = windows.get(name)
        if known is None or abs(row[unit] - goal) < abs(known[unit] - goal):
            windows[name] = row
    if not windows:
        return None
    least = min(abs(row[unit] - goal) for row in windows.values())
    equal = [row for row in windows.values() if abs(row[unit] - goal) <= least + 0.02 * goal]
    best = max(equal, key=lambda row: float(row["score"]))
    return {**best, "method": best["method"] if len(windows) > 1 else method}


def _without(names: Sequence[str]) -> str:
    return f"{NOT_RUN}: {', '.join(names)}" if names else NOT_RUN


def data_sets(run: Run, split: str) -> list[dict[str, Any]]:
    """One row for each data set of LongBench (or LongBench-E) and setup."""
    rows = pooled(run.records, without=("length",))
    return [row for row in rows if row["task"].partition("/")[0] == split]


def _by_type(rows: Sequence[Row], table: Mapping[str, Any]) -> dict[str, list[Row]]:
    """For each task type of the table, one row for each setup that was run on all of its data sets,
    because a mean over other data sets than the paper's would mislead."""
    found: dict[str, list[Row]] = {}
    for mine in grouped(rows, lambda row: (row["series"], row["goal"])).values():
        sets = {row["group"]["dataset"]: row for row in mine}
        kinds = {
            kind: _together([sets[name] for name in names], table["sums"])
            for kind, names in table["datasets"].items()
            if set(names) <= set(sets)
        }
        if AVERAGE in table["results"] and len(kinds) == len(table["datasets"]):
            kinds[AVERAGE] = _together(list(kinds.values()), sums=False)
        for kind, row in kinds.items():
            found.setdefault(kind, []).append(row)
    return found


def _together(rows: Sequence[Row], sums: bool) -> dict[str, Any]:
    """The mean or sum of scores on different cases. The distances to the ends of the intervals are
    added like standard deviations (Zou and Donner, Statistics in Medicine 27, 2008)."""
    over = 1 if sums else len(rows)
    score = math.fsum(row["score"] for row in rows) / over
    low, high = (
        math.hypot(*(row["score"] - row["ci95"][end] for row in rows)) / over for end in (0, 1)
    )
    return {
        "method": rows[0]["method"],
        "score": score,
        "ci95": [max(0.0, score - low), min(len(rows) / over, score + high)],
        "kept": math.fsum(row["kept"] for row in rows) / len(rows),
        "slots": math.fsum(row["slots"] for row in rows) / len(rows),
        "cases": sum(row["cases"] for row in rows),
    }


def _score(row: Row, task: str) -> str:
    scale = scale_of(task)
    return f"{scale.shown(row['score'])} [{scale.interval(row['ci95'])}]"


def _kept(row: Row, unit: str) -> str:
    share = f"{row['kept']:.0%}"
    return share if unit == "kept" else f"{share}, {_amount(row['slots'], unit)}"


def _amount(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "kept" else f"{value:,.0f} slots"
