"""What commands print: for people, or one JSON object for programs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
]
RecentOption = Annotated[
    int | None,
    typer.Option(
        help="Number of last tokens that are kept unchanged; by default 32, and in few bits at "
        "most an eighth of the budget."
    ),
]


def console_for(as_json: bool) -> Console:
    """Readable output goes to standard error if standard output is JSON."""
    return Console(stderr=as_json)


def print_json(command: str, **found: Any) -> None:
    """The line of ``--json``."""
    from kvsketch.evaluation.report.report import dumps

    print(dumps({"command": command, **found}))
