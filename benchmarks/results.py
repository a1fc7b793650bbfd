"""Results that are kept if a run is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.page import save
from kvsketch.evaluation.report.report import environment

Row = dict[str, Any]


class Results:
    """Rows of a benchmark, written to ``out`` after every finished part with ``"complete": false``.
    A run with the same settings, on the same versions and machine, goes on from there. Which other
    ``methods`` are asked for changes no row: a list of others keeps the rows it has in common.

    Args:
        out: the file; None keeps nothing.
        settings: all that decides the numbers; part of what is written.
    """

    def __init__(self, out: Path | None, **settings: Any) -> None:
        self.out = out
        # as it comes back from the file: lists for tuples
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
        """Whether the rows of a part are here already."""
        return any(all(row[k] == v for k, v in part.items()) for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        """Take and write the rows of a part."""
        self.rows += rows
        save(self._object(False), self.out)

    def finish(self) -> Row:
        """Write and return all of it."""
        result = self._object(True)
        save(result, self.out)
        return result

    def _object(self, complete: bool) -> Row:
        return {**self.settings, "complete": complete, "results": self.rows}
