"""Results of a benchmark that are kept if the run is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.page import save
from kvsketch.evaluation.report.report import environment

Row = dict[str, Any]
#: The option ``--out`` of benchmarks that resume.
ResumeOption = Annotated[Path | None, typer.Option(help="Write the JSON here, and resume from it.")]


class Results:
    """Rows of a benchmark, written to ``out`` after every finished part with ``"complete": false``.
    A run with the same settings, versions and machine resumes from this file. The list of
    ``methods`` may differ, because no row depends on the other methods: the rows of the methods
    that are in both lists are kept.

    Args:
        out: the file. With None, nothing is written.
        settings: everything that determines the numbers. It is written, too.
    """

    def __init__(self, out: Path | None, **settings: Any) -> None:
        self.out = out
        # As read from a file: tuples become lists.
        self.settings: Row = json.loads(json.dumps(settings | environment()))
        self.rows: list[Row] = []
        if out is not None and out.is_file():
            before = json.loads(out.read_text(encoding="utf-8"))
            chosen = self.settings.get("methods")
            same = all(
                before.get(name) == value
                for name, value in self.settings.items()
                if name != "methods"
            )
            if same and (before.get("complete") is False or before.get("methods") != chosen):
                self.rows = [
                    row for row in before["results"] if chosen is None or row["method"] in chosen
                ]

    def has(self, **part: Any) -> bool:
        """Whether there are rows of this part already."""
        return any(all(row[k] == v for k, v in part.items()) for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        """Add the rows of a part, and write all rows."""
        self.rows += rows
        save(self._object(False), self.out)

    def finish(self) -> Row:
        """Write the complete result, and return it."""
        result = self._object(True)
        save(result, self.out)
        return result

    def _object(self, complete: bool) -> Row:
        return {**self.settings, "complete": complete, "results": self.rows}


def show(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print some columns of rows on standard error."""
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*(str(row[column]) for column in columns))
    Console(stderr=True).print(shown)
