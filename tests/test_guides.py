"""The code of the documentation runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsketch.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
#: pages whose Python is run; of README it is the first block, with its output
RUN = ("index.md", "how-it-works.md", "guides/transformers.md", "guides/chat.md")
RUN = (*RUN, "guides/adding-a-method.md", "evaluation.md", "vllm.md", "algorithms.md")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:kvsketch", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if blocks(DOCS / page, "python")])
def test_python_of_the_guides_runs(page: str, tmp_path: Path) -> None:
    """All blocks of a page run one after the other in an empty folder."""
    run_python("\n".join(blocks(DOCS / page, "python")), tmp_path)


@pytest.mark.slow
def test_the_readmes_ten_lines_run_anywhere(tmp_path: Path) -> None:
    said = run_python(blocks(ROOT / "README.md", "python")[0], tmp_path).splitlines()
    answer, sizes = blocks(ROOT / "README.md", "text")[0].splitlines()
    assert said[0] == answer
    assert "43514" in answer  # the right one
    (held, whole), (shown, of) = (map(int, re.findall(r"\d+", x)) for x in (said[1], sizes))
    assert whole == of
    assert held == pytest.approx(shown, rel=0.03)
    assert 0.25 < held / whole < 0.3


@pytest.mark.slow
def test_commands_of_the_start_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run in an empty folder; those that install something are left out."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(blocks(DOCS / "index.md", "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    ours = [line[1:] for line in words if line[:1] == ["kvsketch"]]
    assert [line[0] for line in ours] == ["methods", "eval", "report"]
    assert {line[0] for line in words if line} == {"kvsketch", "pip"}
    for line in ours:
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "report.html"}
