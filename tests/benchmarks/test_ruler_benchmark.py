"""The benchmark of RULER with an unseen question at a small size, and its section."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from benchmarks import page_ruler, ruler
from benchmarks.prompts import load
from kvsketch.evaluation.tasks.ruler import Ruler


def test_questions_come_apart_from_their_context() -> None:
    _, tokenizer = load(ruler.MODEL)
    task = Ruler(["niah_multikey_1", "vt"], [600], 2, None, 0)
    found = ruler.questions(tokenizer, task, 4096)
    assert {name: len(asked) for name, asked in found.items()} == {"niah_multikey_1": 2, "vt": 2}
    for case, asked in zip(task.cases(), [x for some in found.values() for x in some], strict=True):
        question = tokenizer.decode(asked.ids[0, asked.record :])
        assert question.strip() == case.question.strip()
        assert asked.score(" ".join(case.answers)) == 1.0
        assert asked.score("nothing of it") == 0.0
        assert asked.new_tokens == case.max_new_tokens


def test_it_runs_goes_on_and_makes_a_section(tmp_path) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(ruler.main)
    words = ["--length", "700", "--count", "1", "--budgets", "0.3", "--out", str(tmp_path / "x")]
    words += ["--subtasks", "niah_single_1,niah_multikey_2", "--json"]
    rows = {}
    for methods in ("exact,streaming_llm", "exact,streaming_llm,heavy_merge@global+int4/sample"):
        done = CliRunner().invoke(app, [*words, "--methods", methods])
        assert done.exit_code == 0, done.output
        result = json.loads(done.stdout.splitlines()[-1])
        rows = {(r["method"], r["subtask"]): r for r in result["results"]}
    assert len(rows) == 6
    assert rows["exact", "niah_single_1"]["accuracy"] == 1.0
    assert rows["heavy_merge@global+int4/sample", "niah_single_1"]["bytes_per_token"] <= 0.302 * 128
    means = page_ruler.averages(result["results"])
    assert means["exact", 1.0] == 1.0
    text = page_ruler.ruler(result)
    assert "| exact | 1 | 1.00 | 1.00 | 1.00 |" in text
    assert f"| {means['streaming_llm', 0.3]:.2f} |" in text


def test_an_unknown_subtask_is_refused() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(ruler.main)
    done = CliRunner().invoke(app, ["--subtasks", "niah_single_9"])
    assert done.exit_code == 2
    assert "niah_single_9" in done.output
