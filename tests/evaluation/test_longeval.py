"""LongEval: cases, reading answers, and the table in the documentation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from test_sweep import METHODS, record_of
from typer.testing import CliRunner

from benchmarks import longeval_markdown as markdown
from benchmarks import longeval_table
from kvsketch.errors import InputError
from kvsketch.evaluation.report.report import report
from kvsketch.evaluation.runner import longeval as task
from kvsketch.evaluation.runner.aggregates import aggregate
from kvsketch.evaluation.runner.longeval import QUESTION_MARK
from kvsketch.evaluation.runner.longeval_cases import ANSWER
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import EXACT, Setup
from kvsketch.evaluation.runner.store import Record
from tiny_model import tiny_case

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data"))


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def record(**changes: Any) -> dict[str, Any]:
    case = tiny_case(4)
    base = {"prompt": case.prompt, "expected_number": case.expected, "num_lines": 4}
    return {**base, **changes}


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [200, 300, 400])
def test_official_files_load(lines: int) -> None:
    path = DATA / "longeval" / f"{lines}_lines.jsonl"
    if not path.is_file():
        pytest.skip(f"official LongEval cases are not at {path}")
    cases = task.load_cases(path)
    assert len(cases) == 50
    assert len({case.id for case in cases}) == 50
    for case in cases:
        assert case.lines == lines
        assert case.prompt.count(QUESTION_MARK) == 1
        assert f"REGISTER_CONTENT is <{case.expected}>" in case.prompt


def test_generated_cases_are_official_in_form_and_depend_on_the_seed() -> None:
    pytest.importorskip("wonderwords")
    cases = task.make_cases([5, 8], 3, seed=1)
    assert [case.lines for case in cases] == [5, 5, 5, 8, 8, 8]
    assert cases == task.make_cases([5, 8], 3, seed=1)
    assert {c.id for c in cases}.isdisjoint(c.id for c in task.make_cases([5, 8], 3, seed=2))
    for case in cases:
        body, question = case.prompt.split(QUESTION_MARK)
        key = question.split("in line ")[1].split("?")[0]
        assert f"line {key}: REGISTER_CONTENT is <{case.expected}>\n" in body
        assert body.count("REGISTER_CONTENT is <") == case.lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([record(), "{oops"], r"cases\.jsonl:2 is not JSON"),
        ([[1, 2]], r"cases\.jsonl:1 must be a JSON object, got list"),
        ([{"prompt": "x"}], r"cases\.jsonl:1 lacks expected_number, num_lines"),
        ([record(prompt=" ")], "prompt must be text"),
        ([record(expected_number="7")], "expected_number must be an int >= 0, got '7'"),
        ([record(expected_number=True)], "expected_number must be an int >= 0, got True"),
        ([record(num_lines=0)], "num_lines must be an int >= 1, got 0"),
        ([""], "holds no cases"),
        ([record(), record()], r"cases\.jsonl:2 repeats the case at .*cases\.jsonl:1"),
    ],
)
def test_bad_case_files_say_where_and_what(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "cases.jsonl", *content)
    with pytest.raises(InputError, match=message):
        task.load_case_files([path])


def test_unreadable_case_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.jsonl cannot be read: No such file"):
        task.load_cases(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        task.load_cases(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        task.load_cases(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (ANSWER.format(key="torpid-kid", number=2416), 2416),
        ("line 7 holds <42>, no, <43>", 43),  # the last number in brackets counts
        ("4,216", 216),  # as the benchmark's own code reads it
        ("007", 7),
        ("-5", 5),
        ("I do not know", -1),
        ("", -1),
    ],
)
def test_answers_are_read_by_the_benchmarks_rule(text: str, answer: int) -> None:
    assert task.read_answer(text) == answer


# --- the table in the documentation --------------------------------------------------------------


def table_rows() -> dict[str, Any]:
    def rows(question: str) -> list[Record]:
        settings = Settings(question=question)
        setups = [(EXACT, 1.0), *((m, b) for b in (0.65, 0.25) for m in METHODS)]
        return [
            record_of(Setup(m, b), float(m == EXACT), settings, group={"lines": 200})
            for m, b in setups
        ]

    records = [record for question in ("seen", "unseen") for record in rows(question)]
    settings = {**Settings().__dict__, "model_fingerprint": "abc"}
    return report("table", aggregate(records), settings=settings, seed=0)


def test_table_shows_our_numbers_and_the_papers(tmp_path: Path) -> None:
    written = longeval_table.write(table_rows(), tmp_path / "docs")
    assert [path.name for path in written] == ["longeval.json", "longeval.md"]
    page = (tmp_path / "docs" / "longeval.md").read_text()
    assert "| exact | 1.00 (0.98) |" in page
    assert "| kcenter (SubGen) | 0.00 (0.86) |" in page
    assert "2402.06082" in page
    assert "## Question unseen" in page
    shown = json.loads((tmp_path / "docs" / "results" / "longeval.json").read_text())
    assert len(shown["results"]) == 18


def test_table_is_skipped_without_the_official_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longeval_table.main(data=tmp_path, docs=tmp_path / "docs")
    assert "skipped: files of the official LongEval cases are missing" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"only": "uniform"}, {"uniform"}),
        ({"windows": True}, {s.label for s in longeval_table.again_by_lines("seen")[200]}),
    ],
    ids=["all", "only", "windows"],
)
def test_what_is_asked_for_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, expected: set[str] | None
) -> None:
    """None: all methods at all shares."""
    asked = []

    class Enough(Exception):
        pass

    def measure(data: Path, question: str, store: Path, limit: int | None, runs: Any) -> None:
        asked.append(runs)
        raise Enough

    for file in longeval_table.case_files(tmp_path):
        file.touch()
    monkeypatch.setattr(longeval_table, "measure", measure)
    with pytest.raises(Enough):
        longeval_table.main(data=tmp_path, docs=tmp_path, questions="seen", **settings)
    (runs,) = asked
    assert (runs is None) if expected is None else {s.label for s in runs[200]} == expected


def own() -> dict[str, Any]:
    """Results with the papers' windows at 200 lines: h2o has no right answer, k-center some
    windows."""
    scores = {"kcenter:0:0.4096": 0.0, "kcenter:0:0.6144": 1.0, "kcenter:0:1261": 1.0}
    setups = [*longeval_table.setups_by_lines()[200]]
    records = []
    for setup in setups:
        score = scores.get(setup.label, float(setup.method == EXACT))
        records.append(record_of(setup, score, group={"lines": 200}, prompt_tokens=2053))
    settings = {**Settings().__dict__, "model_fingerprint": "abc"}
    return report("table", aggregate(records), settings=settings, seed=0)


def test_methods_run_in_their_papers_windows_too() -> None:
    by_lines = longeval_table.setups_by_lines()
    assert set(by_lines) == {200, 300, 400}
    for lines, setups in by_lines.items():
        share = longeval_table.PAPER_SHARES[lines]
        named = [(s.label, s.budget) for s in setups]
        assert ("kcenter", share) in named  # with the window that all methods share
        assert (f"h2o:0:{share / 2:g}", share) in named
        assert ("h2o:0:0.125", 0.25) in named
        centers = [s for s in setups if s.method == "kcenter" and s.window]
        assert all(s.budget == share for s in centers)
        tokens = {200: 5000, 300: 7000, 400: 9000}[lines]
        shares = [s.window[1] for s in centers if s.window and isinstance(s.window[1], float)]
        assert shares == [pytest.approx(r / tokens, abs=1e-4) for r in (2048, 3072)]
    quick = {s.label for s in longeval_table.again_by_lines("seen")[300]}
    assert "kcenter" in quick
    assert not any(name.startswith("heavy_merge") for name in quick)
    assert all(":" in s.label for s in longeval_table.again_by_lines("unseen")[300])


def test_the_page_has_each_papers_own_window_beside_the_common_one() -> None:
    page = markdown.page(own())
    (line,) = (x for x in page.splitlines() if "r = 3,072 of the paper's" in x)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "1,261 of 50"  # of 2,053 tokens; the record has 50 slots
    assert cells[2].startswith("1.00")
    assert cells[3:5] == ["0.00", "0.86"]
    assert "200 lines: kcenter > streaming_llm = h2o (paper: kcenter > h2o > stream" in page
    assert "With 1,261 recent tokens in every prompt of 200 lines" in page
    assert "H2O with half of its budget for recent tokens: 0.00" in page
    assert "3,095, 4,121, 4,633 tokens kept of 4,815, 7,143, 9,447" in page
    assert "SubGen does not say" not in page
    assert "k-center gets 1.00 and H2O 0.00 at 200 lines" in markdown.page(own())
    assert "own window" not in markdown.page(table_rows()).split("## Question seen")[1]


def test_rows_of_an_earlier_run_are_kept_and_named() -> None:
    before, now = table_rows(), own()["results"]
    rows, earlier = longeval_table.with_earlier(now, before)
    kept = [row for row in rows if "run" not in row]
    assert kept == before["results"]
    assert all(row["run"] == "windows" for row in rows[len(kept) :])
    assert {row["method"] for row in rows[len(kept) :]} >= {"h2o:0:0.325", "kcenter:0:0.6144"}
    names = {(row["question"], row["method"], row["budget"]) for row in before["results"]}
    both = [row for row in now if (row["question"], row["method"], row["budget"]) in names]
    assert earlier["checked"] == {"rows": len(both), "differing": []}
    changed = [{**row, "accuracy": 0.5} if row["method"] == "h2o" else row for row in now]
    _, earlier = longeval_table.with_earlier(changed, before)
    assert {(d["method"], d["now"], d["then"]) for d in earlier["checked"]["differing"]} == {
        ("h2o", 0.5, 0.0)
    }
    page = markdown.page({**before, "results": rows, "earlier": earlier})
    assert "h2o (H2O) at 200 lines (0.50 now, 0.00 then)" in page
    assert page.count("| 200 | h2o:0") == 0  # speeds of another run are not shown
    again, still = longeval_table.with_earlier(now, {**before, "results": rows, "earlier": earlier})
    assert [row for row in again if "run" not in row] == kept
    assert still["versions"] == before["versions"]


def test_rows_of_some_methods_are_replaced_and_the_page_says_so() -> None:
    before = table_rows()
    later = [row for row in before["results"] if row["method"] == "h2o"]
    later = [{**row, "accuracy": 0.75, "ci95": [0.5, 0.9]} for row in later]
    rows, said = longeval_table.replaced(later, before, ["h2o"])
    assert len(rows) == len(before["results"])
    assert {row["accuracy"] for row in rows if row["method"] == "h2o"} == {0.75}
    assert all((row.get("run") == "later") == (row["method"] == "h2o") for row in rows)
    assert said["later"]["hardware"] == before["hardware"]
    page = markdown.page({**before, "results": rows, **said})
    assert "Rows of `h2o` are from later runs" in page
    assert "The model of `h2o`, question seen and unseen, was in bfloat16" in page
    costs = [line for line in page.splitlines() if line.startswith("| 200 | ")]
    assert all(line.endswith("| - | - |") == ("| h2o |" in line) for line in costs)
    assert "0.75 [0.50, 0.90]" in page
    some = [row for row in later if row["question"] == "seen"]
    rows, said = longeval_table.replaced(some, before, ["h2o"])
    found = {(row["question"], row["accuracy"]) for row in rows if row["method"] == "h2o"}
    assert ("seen", 0.75) in found
    assert {accuracy for question, accuracy in found if question == "unseen"} == {
        row["accuracy"]
        for row in before["results"]
        if (row["method"], row["question"]) == ("h2o", "unseen")
    }
    once = {**before, "results": rows, **said}
    once["hardware"] = {**before["hardware"], "processor": "another"}
    assert "Rows of `h2o` with the question seen are from later runs" in markdown.page(once)
    # After a second such run, the others are still from the first one.
    unseen = [row for row in later if row["question"] == "unseen"]
    rows, said = longeval_table.replaced(unseen, once, ["h2o"])
    assert said["later"]["questions"] == ["seen", "unseen"]
    assert said["later"]["hardware"] == before["hardware"]
    assert {row["accuracy"] for row in rows if row["method"] == "h2o"} == {0.75}
    with pytest.raises(ValueError, match="rows of h2o were replaced before"):
        longeval_table.replaced(later, once, ["kcenter"])


@pytest.mark.parametrize("arguments", [["--only", "h3o"], ["--only", "h2o", "--windows"]])
def test_only_methods_of_the_table(arguments: list[str], tmp_path: Path) -> None:
    for lines in longeval_table.PAPER_SHARES:
        (tmp_path / f"{lines}_lines.jsonl").touch()
    app = typer.Typer()
    app.command()(longeval_table.main)
    done = CliRunner().invoke(app, ["--data", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert "--only" in done.output
