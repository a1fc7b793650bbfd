"""The papers' tables with our rows beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsketch.evaluation.html_parts import Grid
from kvsketch.evaluation.published import (
    AVERAGE,
    BALANCEKV_TABLE_1,
    CLUSTERGEN_TABLE_2,
    SAME_AS_SUBGEN_TABLE_1,
    SUBGEN_TABLE_1,
)
from kvsketch.evaluation.runs import Run, grouped, pooled
from kvsketch.evaluation.scales import scale_of
from kvsketch.evaluation.setups import EXACT

Row = Mapping[str, Any]

#: LongBench's two sets of cases, as tasks are called here and as papers call them
_SPLITS = {"longbench_e": "LongBench-E", "longbench": "LongBench"}
_HEADER = ("method", "paper", "paper kept", "ours [95%]", "ours kept", "our cases")


def beside(run: Run) -> list[Grid]:
    """The published tables that share a task and a method, besides exact, with the run."""
    found = [_subgen(run)]
    # the same set of cases as the paper's first
    found += [_longbench(run, BALANCEKV_TABLE_1, split) for split in _SPLITS]
    found += [_longbench(run, CLUSTERGEN_TABLE_2, split) for split in reversed(_SPLITS)]
    return [grid for grid in found if any(line[1] != EXACT for line in grid.rows)]


def _subgen(run: Run) -> Grid:
    """LongEval by lines; the paper tells what was kept in GB."""
    rows = [r for r in run.rows if r["task"] == "longeval" and set(r["group"]) == {"lines"}]
    lines = []
    for length, theirs in SUBGEN_TABLE_1["results"].items():
        mine = [row for row in rows if str(row["group"]["lines"]) == length]
        for method, (gigabytes, accuracy) in theirs.items():
            share = gigabytes / theirs[EXACT][0]
            row = _nearest(mine, method, "kept", share)
            if row:
                cells = (f"{accuracy:.2f}", f"{share:.0%}", _score(row, "longeval"))
                lines.append([length, method, *cells, f"{row['kept']:.0%}", str(row["cases"])])
    return Grid(
        "Beside the SubGen paper",
        ("lines", *_HEADER),
        lines,
        f"{SUBGEN_TABLE_1['source']} (the same numbers: {SAME_AS_SUBGEN_TABLE_1}): "
        f"{SUBGEN_TABLE_1['model']}, {SUBGEN_TABLE_1['cases']} cases, question seen; kcenter is "
        f"the paper's SubGen. Ours: {run.title}, the budget that keeps most nearly the same share. "
        "The models differ: compare the order.",
    )


def _longbench(run: Run, table: Mapping[str, Any], split: str) -> Grid:
    """LongBench by task type; the paper tells what was kept as a share or in slots."""
    ours = _by_type(_data_sets(run, split), table)
    unit = "slots" if "slots" in table else "kept"
    lines = []
    for kind, theirs in table["results"].items():
        for method, score in theirs.items():
            row = _nearest(ours.get(kind, []), method, unit, table[unit])
            if row:
                whole = method == EXACT
                kept = f"{1:.0%}" if whole else _amount(table[unit], unit)
                cells = (f"{score:.2f}", kept, _score(row, split))
                lines.append([kind, method, *cells, _kept(row, unit), str(row["cases"])])
    same = "number of slots" if unit == "slots" else "share"
    together = "sum" if table["sums"] else "mean"
    return Grid(
        f"Beside the {table['name']} paper, {_SPLITS[split]}",
        ("task type", *_HEADER),
        lines,
        f"{table['source']}: {table['model']}, {table['protocol']}. Ours: {run.title}, "
        f"{_SPLITS[split]}, all lengths together, the {together} over the same data sets where all "
        f"of them were run, the budget that keeps most nearly the same {same}. The models differ: "
        "compare the order.",
    )


def _nearest(rows: Iterable[Row], method: str, unit: str, goal: float) -> Row | None:
    """The row of a method that keeps most nearly as much."""
    mine = [row for row in rows if row["method"] == method]
    return min(mine, key=lambda row: float(abs(row[unit] - goal)), default=None)


def _data_sets(run: Run, split: str) -> list[dict[str, Any]]:
    """A row for each data set of LongBench (-E) and setup."""
    rows = pooled(run.records, without=("length",))
    return [row for row in rows if row["task"].partition("/")[0] == split]


def _by_type(rows: Sequence[Row], table: Mapping[str, Any]) -> dict[str, list[Row]]:
    """By the table's task types, a row for each setup that was run on all their data sets: a mean
    over other data sets than the paper's would mislead."""
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
    """Mean or sum of scores on different cases; the distances to the intervals' ends add up like
    standard deviations (Zou and Donner, Statistics in Medicine 27, 2008)."""
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
