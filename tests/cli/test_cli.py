"""The command line as a user types it, on a tiny model and, where it is installed, the packaged
one."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_longeval import write
from typer.testing import CliRunner

from kvsketch import SketchCache, __version__
from kvsketch.cli import main
from kvsketch.cli.app import app
from kvsketch.cli.methods_command import LINES
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.runner.store import Store
from kvsketch.method_names import METHOD_NAMES
from tiny_model import save_tiny_model, tiny_case

RESULT_FIELDS = {
    "method",
    "budget",
    "lines",
    "accuracy",
    "ci95",
    "cases",
    "slots",
    "kv_bytes",
    "exact_kv_bytes",
    "peak_kv_bytes",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cases") / "cases.jsonl"
    records = [
        {"prompt": case.prompt, "expected_number": case.expected, "num_lines": case.lines}
        for case in (tiny_case(20, i) for i in range(3))
    ]
    return str(write(path, *records))


def kvsketch(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result


def refused(*words: str) -> str:
    """The line of the error with which a command is refused."""
    result = kvsketch(*words, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


def longeval(model: str, cases: str, *words: str) -> list[str]:
    return [
        *("eval", "longeval", "--model", model, "--cases", cases, "--recent", "8"),
        *("--max-new-tokens", "4", *words),
    ]


def test_version_and_help() -> None:
    assert kvsketch("--version").stdout == f"kvsketch {__version__}\n"
    for words in (
        ("--help",),
        ("eval", "--help"),
        ("calibrate", "--help"),
        ("demo", "--help"),
    ):
        assert "Example: kvsketch" in kvsketch(*words).stdout


def test_methods_lists_every_method_with_its_paper() -> None:
    shown = json.loads(kvsketch("methods", "--json").stdout)
    assert shown["command"] == "methods"
    names = [method["name"] for method in shown["methods"]]
    assert names == list(METHOD_NAMES)
    assert {"uniform", "streaming_llm", "h2o", "kcenter"} <= set(names)
    assert all(method["summary"] and method["paper"] for method in shown["methods"])
    assert len({method["summary"] for method in shown["methods"]}) == len(names)
    assert shown["default"] == inspect.signature(SketchCache).parameters["method"].default


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_methods_are_listed_a_line_each(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups, the default first and marked; a narrow terminal wraps lines between words."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = kvsketch("methods").stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if line[:1].islower() and line[0] != "`"]
    if columns >= 80:
        assert [line.split()[0] for line in lines] == list(LINES)
        assert set(LINES) == set(METHOD_NAMES)
        assert len(lines) == len(METHOD_NAMES)
    assert lines[0].startswith("heavy_merge (default) ")
    assert shown.count("(default)") == 1


def test_methods_say_what_they_need_and_promise() -> None:
    """Of those that are named; no markup is left in the text."""
    shown = kvsketch("methods", "subgen", "snapkv", "streaming_llm").stdout
    assert "``" not in shown
    text = " ".join(shown.split())
    for words in ("needs the model's queries", "needs none", "Theorem 1,", "none proved"):
        assert words in text
    rows = {row["name"]: row for row in json.loads(kvsketch("methods", "--json").stdout)["methods"]}
    assert rows["subgen"]["streams"].startswith("as a streaming sketch")
    assert rows["subgen"]["guarantee"].startswith("Theorem 1")
    assert rows["kvzip"]["queries"].startswith("needs the queries of a second reading")
    assert rows["streaming_llm"]["queries"] == "needs none"
    assert rows["snapkv"]["guarantee"] == "none proved"


def test_options_of_a_method_are_explained() -> None:
    shown = json.loads(kvsketch("methods", "heavy_merge", "sliding_window", "--json").stdout)
    merge, window = shown["methods"]
    options = {option["name"]: option for option in merge["options"]}
    assert options["window"]["default"] == 64
    assert options["window"]["meaning"] == "number of last queries whose attention counts, >= 1."
    (required,) = window["options"]
    assert required["required"]
    text = " ".join(kvsketch("methods", "heavy_merge").stdout.split())
    assert (
        "option share (default none): fraction of the budget that keeps tokens unchanged"
        in text.lower()
    )
    assert "did you mean 'heavy_merge'" in refused("methods", "heavy_marge")
    every = json.loads(kvsketch("methods", "--json").stdout)["methods"]
    for method in every:  # a base class may explain an option
        assert all(option["meaning"] for option in method["options"]), method


def test_brackets_of_an_extra_are_shown() -> None:
    text = "".join(kvsketch("eval", "--help").stdout.replace("│", " ").split())
    assert "pipinstallkvsketch[ray]" in text


def test_a_log_gets_lines_of_progress(
    model: str, cases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsketch.evaluation.runner.progress.EVERY", 0.0)
    result = kvsketch(*longeval(model, cases, "--methods", "exact"))
    first, second, third = result.stderr.splitlines()
    assert first == "0 of 3 answers"
    assert second.startswith("1 of 3 answers, ")
    assert third.startswith("2 of 3 answers, ")
    assert third.endswith(" s left")


def test_longeval_json_is_the_last_line_and_complete(model: str, cases: str) -> None:
    words = longeval(model, cases, "--methods", "exact,streaming_llm,h2o,kcenter,uniform")
    result = kvsketch(*words, "--budgets", "0.5,64", "--json")
    (line,) = result.stdout.splitlines()  # the table goes to standard error
    shown = json.loads(line)
    assert shown["command"] == "eval longeval"
    assert {"settings", "versions", "hardware", "seed"} <= set(shown)
    assert set(shown["versions"]) == {"kvsketch", "torch", "transformers", "python"}
    rows = shown["results"]
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("exact", 1.0),
        *((m, b) for b in (0.5, 64) for m in ("streaming_llm", "h2o", "kcenter", "uniform")),
    ]
    for row in rows:
        assert set(row) >= RESULT_FIELDS
        assert row["cases"] == 3
        assert 0 <= row["ci95"][0] <= row["accuracy"] <= row["ci95"][1] <= 1
        assert row["exact_kv_bytes"] == rows[0]["kv_bytes"]
    assert "kcenter" in result.stderr


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_longeval_shows_a_table_that_fits(
    model: str, cases: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    methods = "exact,streaming_llm,h2o:2:8@measured+int4"
    words = ("--limit", "1", "--budgets", "0.5", "--methods", methods)
    result = kvsketch(*longeval(model, cases, *words))
    assert "20 lines" in result.stdout
    assert "streaming_llm" in result.stdout
    assert "…" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= columns
    head = next(line for line in result.stdout.splitlines() if line.startswith("method"))
    exact = next(line for line in result.stdout.splitlines() if line.startswith("exact"))
    assert head.split() == [
        *("method", "budget", "cases", "score", "95%", "CI"),
        *(() if columns == 60 else ("slots", "KV", "kB")),
        "kept",
        *(("peak", "kB", "prefill/s") if columns == 120 else ()),
        *(() if columns == 60 else ("tok/s",)),
    ]
    assert "100.0%" in exact
    assert len(exact.rstrip()) == len(head.rstrip())  # numbers are right-justified and whole


def test_a_model_whose_settings_have_the_cache_off(model: str, cases: str, tmp_path: Path) -> None:
    """As after a training: ``generate`` would pass all of the text at every step."""
    off = shutil.copytree(model, tmp_path / "off")
    settings = json.loads((off / "generation_config.json").read_text())
    (off / "generation_config.json").write_text(json.dumps({**settings, "use_cache": False}))
    words = ("--methods", "exact,heavy_merge", "--budgets", "0.5", "--json")
    on, other = (
        json.loads(kvsketch(*longeval(str(m), cases, *words)).stdout)["results"]
        for m in (model, off)
    )
    for name in ("accuracy", "kv_bytes", "exact_kv_bytes"):
        assert [row[name] for row in on] == [row[name] for row in other]


def test_several_case_files_follow_one_option(model: str, cases: str, tmp_path: Path) -> None:
    case = tiny_case(12)
    more = write(
        tmp_path / "more.jsonl",
        {"prompt": case.prompt, "expected_number": case.expected, "num_lines": 12},
    )
    words = longeval(model, cases, str(more), "--methods", "exact", "--json")
    rows = json.loads(kvsketch(*words).stdout)["results"]
    assert [(row["lines"], row["cases"]) for row in rows] == [(20, 3), (12, 1)]


def test_generated_cases(model: str) -> None:
    pytest.importorskip("wonderwords")
    words = ["eval", "longeval", "--model", model, "--lines", "5,9", "--num-cases", "2"]
    words += ["--methods", "exact", "--max-new-tokens", "2", "--json"]
    rows = json.loads(kvsketch(*words).stdout)["results"]
    assert [(row["lines"], row["cases"]) for row in rows] == [(5, 2), (9, 2)]


def test_resume_needs_no_model_for_what_is_done(
    model: str, cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.jsonl"
    words = longeval(model, cases, "--budgets", "0.5", "--out", str(out), "--json")
    first = json.loads(kvsketch(*words).stdout)["results"]
    written = out.read_bytes()

    def never(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load_model", never)
    assert json.loads(kvsketch(*words).stdout)["results"] == first
    assert out.read_bytes() == written
    with pytest.raises(AssertionError, match="the model was loaded"):  # the answers may change
        CliRunner().invoke(app, [*words, "--max-new-tokens", "5"], catch_exceptions=False)


def test_interrupt_keeps_what_is_done_and_resumes(
    model: str, cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.jsonl"
    words = longeval(model, cases, "--budgets", "0.5", "--out", str(out))
    add = Store.add

    def add_then_stop(store: Store, record: Any) -> None:
        add(store, record)
        if len(store) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", add_then_stop)
        result = kvsketch(*words, code=130)
    assert "4 of 18 answers are done" in result.stderr
    assert "streaming_llm" in result.stdout
    assert len(out.read_text().splitlines()) == 4
    rows = json.loads(kvsketch(*words, "--json").stdout)["results"]
    assert [row["cases"] for row in rows] == [3] * 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "kcentre"], "'kcentre' is unknown; did you mean 'kcenter'"),
        (["--methods", ","], "--methods is empty"),
        (["--budgets", "0"], "budget=0"),
        (["--budgets", "1.5"], "budget=1.5"),
        (["--budgets", "lots"], "budget='lots' is not a number"),
        (["--budgets", "8", "--recent", "32"], "budget=8"),
        (["--limit", "0"], "--limit 0 must be at least 1"),
        (["--sink", "-1"], "--sink -1"),
        (["--question", "later"], "--question 'later'"),
        (["--device", "warp"], "--device 'warp'"),
        (["--lines", "5"], "--cases reads files and --lines"),
        (["--model", "/no/such/folder"], "--model '/no/such/folder' is not a folder"),
        (["--model", "."], "has no config.json"),
        (["--out", "/proc/nowhere/run.jsonl"], "--out /proc/nowhere/run.jsonl cannot be written"),
        (["--max-new-tokens", "1024"], "1024 positions"),
    ],
)
def test_errors_come_before_the_model(
    model: str,
    cases: str,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load_model", never)
    monkeypatch.chdir(tmp_path)  # "." is a folder without a model
    assert message in refused(*longeval(model, cases, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cases", "no.jsonl"], "no.jsonl cannot be read: No such file"),
        (["--lines", "many"], "--lines 'many' must be an int >= 1"),
        (["--lines", "0"], "--lines '0' must be an int >= 1"),
        (["--num-cases", "0"], "--num-cases 0 must be at least 1"),
    ],
)
def test_errors_about_cases(model: str, words: list[str], message: str) -> None:
    assert message in refused("eval", "longeval", "--model", model, *words)


def test_a_file_of_options_gives_what_the_command_line_does_not(
    model: str, cases: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"tasks: [longeval]\nmodel: {model}\ncases: [{cases}]\nmethods: [exact, h2o]\n"
        "budgets: [0.5, 0.25]\nmax-new-tokens: 4\nrecent: 8\njson: true\n",
        encoding="utf-8",
    )
    rows = json.loads(kvsketch("eval", "--config", str(config)).stdout.splitlines()[-1])["results"]
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("exact", 1.0),
        ("h2o", 0.5),
        ("h2o", 0.25),
    ]
    found = kvsketch("eval", "--config", str(config), "--methods", "uniform", "--budgets", "0.3")
    (row,) = json.loads(found.stdout.splitlines()[-1])["results"]
    assert (row["method"], row["budget"], row["cases"]) == ("uniform", 0.3, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[1", "is not YAML"),
        ("- 1", "must be a mapping"),
        ("method: h2o", "did you mean 'methods'"),
        ("budgets: [2.5]", "budget=2.5"),
    ],
)
def test_bad_files_of_options_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    config = tmp_path / "run.yaml"
    if content is not None:
        config.write_text(content, encoding="utf-8")
    result = kvsketch("eval", "longeval", "--config", str(config), code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_layers_over_devices_need_accelerate(
    model: str, cases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda: False)
    message = refused(*longeval(model, cases), "--device", "auto")
    assert "--device auto needs accelerate: pip install accelerate" in message


def test_calibrate_writes_curves_that_eval_reads(model: str, cases: str, tmp_path: Path) -> None:
    texts = [tmp_path / f"{i}.txt" for i in range(2)]
    for i, text in enumerate(texts):
        text.write_text(tiny_case(25, i).prompt, encoding="utf-8")
    curves = tmp_path / "curves.json"
    words = ("--model", model, "--recent", "8", "--follow", "16", "--out", str(curves), "--json")
    shown = json.loads(kvsketch("calibrate", *map(str, texts), *words).stdout.splitlines()[-1])
    assert (shown["layers"], shown["heads"]) == (2, 2)
    kept = shown["kept_by_tolerance"]
    assert 0 < kept["0.1"] <= kept["0.05"] <= kept["0.02"] <= 1
    options = ("--methods", "heavy_merge+16bit,uniform", "--budgets", "0.3", "--json")
    peaks = {}
    for allocation in (str(curves), "measured", "even"):
        run = kvsketch(*longeval(model, cases, *options, "--allocation", allocation))
        rows = json.loads(run.stdout.splitlines()[-1])["results"]
        ours, uniform = (row["slots"] for row in rows)
        assert ours == pytest.approx(uniform, rel=0.03)
        peaks[allocation] = [row["peak_kv_bytes"] for row in rows]
    # if budgets are measured on the prompt, all layers are compressed after the last one's prefill
    assert all(a > b for a, b in zip(peaks["measured"], peaks["even"], strict=True))


def test_calibrate_refuses_before_it_measures(model: str, tmp_path: Path) -> None:
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("calm-dark", encoding="utf-8")
    latin.write_bytes(b"caf\xe9")
    out = str(tmp_path / "c.json")
    for words, message in (
        ((str(short), "--out", out), "short.txt: a prompt of"),
        ((str(tmp_path / "none.txt"), "--out", out), "none.txt cannot be read"),
        ((str(latin), "--out", out), "not UTF-8"),
        ((str(short), "--out", out, "--method", "snapv"), "did you mean 'snapkv'"),
        ((str(short), "--out", out, "--follow", "0"), "--follow 0"),
        ((str(short), "--out", str(short / "c.json")), "the folder"),
    ):
        assert message in refused("calibrate", *words, "--model", model)
    assert not Path(out).exists()


def test_model_that_is_not_on_the_hub(monkeypatch: pytest.MonkeyPatch, cases: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # as without a network
    line = refused(*longeval("nobody/no-such-model", cases))
    assert "'nobody/no-such-model' is not a local folder and could not be fetched" in line


def test_broken_model_folder(tmp_path: Path, model: str, cases: str) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in refused(*longeval(str(tmp_path), cases))
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    (tmp_path / "model.safetensors").unlink()
    assert "cannot be loaded" in kvsketch(*longeval(str(tmp_path), cases), code=2).stderr


@pytest.mark.skipif(
    not (loading.packaged_model() / "config.json").is_file(),
    reason="the packaged model is not there yet",
)
def test_packaged_model_answers_a_short_record() -> None:
    pytest.importorskip("wonderwords")
    words = ["eval", "longeval", "--lines", "20", "--num-cases", "4", "--methods", "exact"]
    (row,) = json.loads(kvsketch(*words, "--json").stdout)["results"]
    assert row["accuracy"] >= 0.75


def test_a_shell_completes_commands_and_options() -> None:
    """bash passes the words so far and the number of the one being typed, and gets the
    completion."""
    for words, place, expected in (
        ("kvsketch inspe", "1", "inspect"),
        ("kvsketch eval --toler", "2", "--tolerances"),
    ):
        asked = {"_KVSKETCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        result = CliRunner().invoke(app, [], env=asked, prog_name="kvsketch")
        assert result.stdout.split() == [expected]


def test_info_without_a_file_is_about_the_installation() -> None:
    from kvsketch.kernels import native

    found = json.loads(kvsketch("info", "--json").stdout)
    assert found["hardware"]["cpu_kernel"] == native.kernel()
    said = kvsketch("info").output
    assert "cpu kernel" in said
    assert native.kernel() in said


@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_that_wait_soon_sleep_unless_told_otherwise(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, chosen.get(name, ""))  # and restored in the end
        if name not in chosen:
            del os.environ[name]
    monkeypatch.setattr(sys, "argv", ["kvsketch", "--version"])
    with pytest.raises(SystemExit):
        main()
    left = {} if "OMP_WAIT_POLICY" in chosen else {"GOMP_SPINCOUNT": "100000"}
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    assert {n: os.environ[n] for n in names if n in os.environ} == {**left, **chosen}
