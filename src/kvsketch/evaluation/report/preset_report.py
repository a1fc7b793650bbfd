"""What a preset's run shows besides its own tables: the paper's, what is missing, how it is
read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvsketch.evaluation.report.parts import Grid
from kvsketch.evaluation.report.published_panel import NOT_RUN, beside
from kvsketch.evaluation.runner.preset_run import Plan
from kvsketch.evaluation.runner.runs import run_of
from kvsketch.evaluation.runner.setups import EXACT
from kvsketch.evaluation.runner.sweep import Sweep


def show(plan: Plan, sweep: Sweep, console: Console) -> dict[str, Any]:
    """Prints it; returns what ``--json`` tells of it."""
    records = sweep.done()
    grids = beside(run_of(records)) if records else []
    for grid in grids:
        console.print()
        console.print(_table(grid))
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
    """Prompts that fit into a budget are not compressed: what then stands beside the paper is the
    exact cache."""
    whole = dict.fromkeys(
        row["task"]
        for row in rows
        if row["method"] != EXACT and row["slots"] >= row["prompt_tokens"] > 0
    )
    return [f"Nothing was compressed in {', '.join(whole)}: the prompts fit."] if whole else []


def _table(grid: Grid) -> Table:
    table = Table(
        title=grid.title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in grid.header:  # 80 columns hold it all, but for what was kept in slots
        table.add_column(name, no_wrap=not name.endswith("kept"))
    for row in grid.rows:
        # What a task type lacks is said below the table.
        cells = (NOT_RUN if cell.startswith(NOT_RUN) else cell for cell in row)
        table.add_row(*map(escape, cells))
    return table
