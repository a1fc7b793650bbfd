"""One HTML page from results stores. It loads nothing from other places, works without scripts, and
is the same, byte for byte, for the same stores.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvsketch import __version__
from kvsketch.errors import InputError
from kvsketch.evaluation.report.figures import Figure, Sketchbook, write
from kvsketch.evaluation.report.panels import sections
from kvsketch.evaluation.report.parts import Grid, Section
from kvsketch.evaluation.report.style import require_matplotlib
from kvsketch.evaluation.report.summary import headline, summary
from kvsketch.evaluation.runner.files import check_folder, read_text, try_folder
from kvsketch.evaluation.runner.runs import Run, clean, read_runs, without_folders
from kvsketch.evaluation.runner.scales import scale_of
from kvsketch.writing import check_replaced, save_bytes

#: The facts about a run that the page shows, in this order, if they are known.
_PROTOCOL = {
    "model": "model",
    "model_fingerprint": "fingerprint",
    "kvsketch": "kvsketch",
    "preset": "preset: a paper's table",
    "question": "question at compression",
    "prefill": "prefill",
    "prefill_chunk_size": "prefill chunk, tokens",
    "one_shot": "answers kept exact",
    "sink": "first tokens kept",
    "recent": "last tokens kept",
    "max_prompt_tokens": "longest prompt, tokens",
    "device": "device",
    "dtype": "dtype",
}
COLUMNS = (
    "run",
    "task",
    "group",
    "method",
    "budget",
    "cases",
    "score",
    "95%",
    "kept %",
    "KV kB",
    "peak kB",
    "tokens",
    "prefill/s",
    "decode/s",
)
SPEEDS = ("prefill_tokens_per_s", "decode_tokens_per_s")


@dataclass(frozen=True)
class HtmlPage:
    """A report.

    Attributes:
        html: the text of the page.
        figures: all figures of the page, in order.
        runs: the runs that it reports.
    """

    html: str
    figures: Sequence[Figure]
    runs: Sequence[Run]


def build(stores: Sequence[Path], inspect: Path | None = None, png: bool = False) -> HtmlPage:
    """Read stores and make a page of them.

    Args:
        inspect: an inspect.json that ``kvsketch inspect --out`` wrote.
        png: whether figures are also drawn as PNG.

    Raises:
        InputError: a store or ``inspect`` cannot be read or has the wrong content.
        UnsupportedError: matplotlib is not installed.
    """
    runs = read_runs(stores)
    result = None if inspect is None else _read_inspection(inspect)
    require_matplotlib()
    methods = list(dict.fromkeys(row["method"] for run in runs for row in run.rows))
    book = Sketchbook(methods, png)
    # First, since a file with a part missing is refused only where the part is drawn.
    looked = None if inspect is None else _inspected(inspect, result, book)
    parts = {run.number: sections(run, book) for run in runs}
    figures = [
        figure
        for section in [
            *(s for found in parts.values() for s in found),
            *([looked] if looked else []),
        ]
        for figure in section.figures
    ]
    environment = Environment(
        loader=PackageLoader("kvsketch.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda figure: Markup(figure.inline)
    script, style = (_asset(environment, name) for name in ("report.js", "report.css"))
    html = environment.get_template("report.html").render(
        version=__version__,
        stores=[clean(path.name) for path in stores],
        runs=[
            {
                "number": run.number,
                "title": run.title,
                "protocol": _protocol(run),
                "headline": headline(run),
                "summary": summary(run),
                "sections": parts[run.number],
            }
            for run in runs
        ],
        looked=looked,
        methods=[(method, book.color(method)) for method in methods],
        tasks=list(dict.fromkeys(row["task"] for run in runs for row in run.rows)),
        columns=COLUMNS,
        rows=[_table_row(run, row) for run in runs for row in run.rows],
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(f"{style}{book.rules}\n"),
    )
    return HtmlPage(html, figures, runs)


def check_outputs(page: Path, figures: Path | None) -> None:
    """Check before drawing that the page and the figures can be written. Makes the folder of
    figures.

    Raises:
        InputError: the page or the folder cannot be written.
    """
    if page.is_dir():
        raise InputError(f"--out {page} is a folder; give a file, such as report.html")
    if page.exists() and not os.access(page, os.W_OK):
        raise InputError(f"--out {page} cannot be written: permission denied")
    begins = rb'<!DOCTYPE html>.{,2000}<meta name="generator" content="kvsketch '
    check_replaced(page, "--out", begins, "a page of `kvsketch report`")
    if not page.exists() or page.is_file():  # tested in its folder, since a new file replaces it
        try_folder(page.parent, f"--out {page}: the folder")
    if figures is not None:
        check_folder(figures, "--figures")


def save(page: HtmlPage, path: Path, figures: Path | None) -> list[str]:
    """Write a page and, if a folder is given, its figures. Returns the file names of the figures.
    The folder of the page is made if it is missing.

    Raises:
        InputError: a file cannot be written.
    """
    if not path.exists():
        check_folder(path.parent, f"--out {path}: the folder")
    save_bytes(path, page.html.encode(), f"--out {path}")
    return write(page.figures, figures) if figures is not None else []


def _asset(environment: Environment, name: str) -> str:
    """The unchanged text of a file in the template's folder."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _protocol(run: Run) -> list[tuple[str, str]]:
    common = {**run.common, "model": run.model}
    named = [(label, common[key]) for key, label in _PROTOCOL.items() if key in common]
    named += [(name, ", ".join(values)) for name, values in run.made.items()]
    named += [(key, value) for key, value in run.common.items() if key not in _PROTOCOL]
    if "preset" in run.common:  # the names of its methods state their windows
        windows = {_PROTOCOL["sink"], _PROTOCOL["recent"]}
        named = [(label, value) for label, value in named if label not in windows]
    words = {True: "yes", False: "no"}
    return [
        (label, words[value] if isinstance(value, bool) else str(value))
        for label, value in named
        if value is not None
    ]


def _table_row(run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of one row of the table of all rows."""
    scale = scale_of(row["task"])
    cells = [
        f"{run.number}",
        row["task"],
        ", ".join(f"{name} {value}" for name, value in row["group"].items()),
        row["method"],
        row["goal"],
        f"{row['cases']}",
        scale.shown(row["score"]),
        scale.interval(row["ci95"]),
        f"{100 * row['kept']:.1f}",
        *(f"{row[name] / 1000:,.0f}" for name in ("kv_bytes", "peak_kv_bytes")),
        f"{row['prompt_tokens']:,.0f}",
        *("-" if row[name] is None else f"{row[name]:,.0f}" for name in SPEEDS),
    ]
    return {"task": row["task"], "method": row["method"], "cells": cells}


def _read_inspection(path: Path) -> Any:
    try:
        return _cleaned(json.loads(read_text(path, "--inspect")))
    except ValueError as error:
        raise InputError(f"--inspect {path} is not JSON: {error}") from error


def _cleaned(value: Any) -> Any:
    """A value from JSON with all unprintable characters removed from its texts."""
    if isinstance(value, dict):
        return {clean(key): _cleaned(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_cleaned(x) for x in value]
    return clean(value)


def _inspected(path: Path, result: Any, book: Sketchbook) -> Section:
    """The figures and readings of ``kvsketch inspect``."""
    from kvsketch.evaluation.inspection import figures as inspection_figures

    figures = []
    try:
        for name, draw in inspection_figures.FIGURES.items():
            if name != "tsne" or result["tsne"]:
                words = inspection_figures.caption(name, result)

                def drawn(draw: Any = draw) -> Any:
                    return draw(result)

                figures.append(book.take(f"inspect: {name}", words, drawn))
        theory = str(result["readings"].get("theory", ""))
        errors = sorted(result["errors"].items(), key=lambda item: item[1])
        grid = Grid(
            f"Relative attention error, {result['kept']:.0%} kept",
            ("method", "error"),
            [[name, f"{value:.3f}"] for name, value in errors],
        )
        tokens = ", ".join(f"{count:,}" for count in result["tokens"])
        title = clean(f"Activations: {without_folders(str(result['model']))}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"--inspect {path} is not an inspect.json of kvsketch inspect --out: "
            f"{type(error).__name__} {error}"
        ) from error
    return Section(title, f"Prompts of {tokens} tokens. {theory}", figures, [grid])
