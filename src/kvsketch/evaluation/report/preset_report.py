"""The output of a preset's run besides the tables of results: the paper's table, the rows that are
missing, and how the paper was interpreted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group

from kvsketch.evaluation.report.parts import Grid
from kvsketch.evaluation.report.published_panel import NOT_RUN, beside
from kvsketch.evaluation.report.terminal import tables_within
from kvsketch.evaluation.runner.preset_run import PresetRun
from kvsketch.evaluation.runner.runs import run_of
from kvsketch.evaluation.runner.setups import EXACT
from kvsketch.evaluation.runner.sweep import Sweep


def show(plan: PresetRun, sweep: Sweep, console: Console) -> dict[str, Any]:
    """Print the output, and return the object for ``--json``."""
    records = sweep.done()
    grids = beside(run_of(records)) if records else []
    for grid in grids:
        for table in _tables(grid, console.width):
            console.print()
            console.print(table)
        console.print(grid.note, markup=False, highlight=False)
    if plan.missing:
        console.print(f"\nNot run: {'; '.join(plan.missing)}.", markup=False, highlight=False)
    console.print("\nHow the paper is read:", highlight=False)
    notes = [*plan.notes, *_nothing_lost(sweep.rows())]
    for line in notes:
        console.print(f"- {line}", markup=False, highlight=False)
    return {
        "preset": plan.preset.name,
        "published": [
            {
                "title": grid.title,
                "note": grid.note,
                "rows": [dict(zip(grid.header, row, strict=True)) for row in grid.rows],
            }
            for grid in grids
        ],
        "missing": list(plan.missing),
        "notes": notes,
    }


def _nothing_lost(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note about the tasks in which nothing was compressed because the prompts fit into the
    budget, so that the exact cache is compared with the paper's method."""
    whole = dict.fromkeys(
        row["task"]
        for row in rows
        if row["method"] != EXACT and row["slots"] >= row["prompt_tokens"] > 0
    )
    return [f"Nothing was compressed in {', '.join(whole)}: the prompts fit."] if whole else []


def _tables(grid: Grid, width: int) -> Iterator[Group]:
    # The note below the table states what is missing of a task type.
    rows = [[NOT_RUN if cell.startswith(NOT_RUN) else cell for cell in row] for row in grid.rows]
    names = 1 + list(grid.header).index("method")
    return tables_within(width, grid.title, grid.header, rows, names=names, left=grid.header)
