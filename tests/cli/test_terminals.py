"""On terminals of 40, 60 and 80 columns no command cuts a number or prints too long a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvsketch.cli.app import app
from kvsketch.cli.inspect_tables import tables
from kvsketch.evaluation.report.parts import Grid
from kvsketch.evaluation.report.preset_report import _tables
from kvsketch.evaluation.report.published_panel import NOT_RUN
from tiny_model import save_tiny_model, tiny_case

INSPECTED = Path(__file__).parents[2] / "docs" / "results" / "inspect.json"


def shown(tables: Sequence[RenderableType], columns: int) -> str:
    console = Console(width=columns)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def check(text: str, columns: int) -> None:
    assert "\u2026" not in text  # the ellipsis of cut text
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_inspect_shows_every_number(columns: int) -> None:
    for result in json.loads(INSPECTED.read_text(encoding="utf-8"))["results"]:
        text = shown(list(tables(result, columns)), columns)
        check(text, columns)
        words = text.split()
        for row in result["layers"][:6]:
            assert f"{row['clusterability']['values']['eighth']:.2f}" in words
            assert f"({row['norms']['score']['max']:.1f})" in words
            for error in row["errors"].values():
                assert f"{error:.3f}" in words
    if columns == 80:  # every table fits in one piece
        assert "(continued)" not in text


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_papers_table_shows_every_number(columns: int) -> None:
    header = ("lines", "method", "paper", "paper kept", "ours [95%]", "ours kept", "our cases")
    rows = [
        ["200", "exact", "0.42", "100%", "50.21 [45.10-55.32]", "100%", "150"],
        ["200", "balancekv", "0.40", "25% (1,024 slots)", f"{NOT_RUN}, because", "", ""],
    ]
    text = shown(list(_tables(Grid("A table [1]", header, rows), columns)), columns)
    check(text, columns)
    for word in ("50.21", "55.32]", "150", "[1]", "1,024", NOT_RUN.split()[0]):
        assert word in text.replace("[45.10-", " ")
    assert text.count("A table") == {40: 4, 60: 3, 80: 2, 120: 1}[columns]
    assert all(line.startswith("200") for line in text.splitlines() if "exact" in line)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_compress_info_and_plan_show_everything(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = tmp_path / "a-folder-whose-name-is-longer-than-a-line-of-a-narrow-terminal"
    model = str(save_tiny_model(folder))
    text, path = tmp_path / "doc.txt", tmp_path / "a doc.kvs"
    text.write_text(tiny_case(30).prompt)

    def run(*words: Any) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.stdout

    summary = run("compress", text, "-o", path, "--model", model, "--budget", "0.5")
    assert "\u2026" not in summary
    # commands and paths stay on one line, so that they can be copied
    assert f"Next: kvsketch ask '{path}' \"YOUR QUESTION\"" in summary.splitlines()
    info = run("info", path)
    check(info, columns)
    cells = [line.split("\u2502")[2] for line in info.splitlines() if line.count("\u2502") == 3]
    assert str(folder.resolve()) in "".join(cell.strip() for cell in cells)
    words = ("--gpu-memory", "1GiB", "--context", "1k", "--concurrency", "9000")
    plan = run("plan", "--model", model, *words)
    assert "\u2026" not in plan
    table = [line for line in plan.splitlines() if "\u2502" in line or "\u2503" in line]
    assert max(map(len, table)) <= columns
