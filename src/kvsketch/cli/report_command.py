"""`kvsketch report`: one page from results stores.

Heavy imports happen inside, as in ``kvsketch.cli.app``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.printing import JsonOption, console_for, print_json

EPILOG = "Example: kvsketch report run.jsonl -o report.html"


def report_command(
    stores: Annotated[
        list[Path],
        typer.Argument(metavar="STORE...", help="Results written by `kvsketch eval --out`."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File to write the page to.")
    ] = Path("report.html"),
    inspect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An inspect.json written by `kvsketch inspect --out`."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write every figure (.svg, .png) here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page of results: figures, heat maps, tables."""
    from kvsketch.evaluation.report.html import build, check_outputs, save
    from kvsketch.evaluation.report.summary import headline, summary

    check_outputs(out, figures)
    page = build(stores, inspect, png=figures is not None)
    files = save(page, out, figures)
    console = console_for(as_json)
    for run in page.runs:
        console.print(
            f"run {run.number}: {run.title}\n  {headline(run)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{len(page.figures)} figures are in {out} ({len(page.html.encode()) / 1000:,.0f} kB)",
        markup=False,
        soft_wrap=True,
    )
    if as_json:
        runs = [
            {
                **run.common,
                "rows": len(run.rows),
                "answers": len(run.records),
                "summary": [
                    dict(zip(summary(run).header, line, strict=True)) for line in summary(run).rows
                ],
            }
            for run in page.runs
        ]
        drawn = [{"name": f.name, "title": f.title} for f in page.figures]
        told = {"out": str(out), "stores": [str(path) for path in stores], "runs": runs}
        print_json("report", **told, figures=drawn, files=files)
