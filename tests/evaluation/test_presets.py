"""Presets: the papers' protocols, contradictions to them, whole runs, and their tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import kvsketch, refused
from test_longeval import write
from test_refusals import outcomes
from test_sweep import record_of

from kvsketch import SketchCache
from kvsketch.cli.preset_options import find_preset
from kvsketch.errors import InputError
from kvsketch.evaluation.report.html import build
from kvsketch.evaluation.report.published import (
    BALANCEKV_TABLE_1,
    CLUSTERGEN_TABLE_2,
    SUBGEN_TABLE_1,
)
from kvsketch.evaluation.report.published_panel import NOT_RUN
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.runner.preset_run import fitted_prompts, plan
from kvsketch.evaluation.runner.presets import PRESETS
from kvsketch.evaluation.runner.replies import new_cache
from kvsketch.evaluation.runner.runs import read_runs
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup, parse_method
from kvsketch.evaluation.runner.store import Record, Store
from kvsketch.evaluation.tasks.longbench_prompts import DATASETS
from tiny_model import save_tiny_model, tiny_case, tiny_model, tiny_tokenizer

CLASSES = ["Price", "Date"]
WORDS = "brave calm dark early fair glad huge idle line number"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that ends most answers long before the tokens that LongBench allows."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    ending = tiny_model(len(tiny_tokenizer()))
    with torch.no_grad():
        ending.lm_head.weight[ending.config.eos_token_id] *= 2
    ending.save_pretrained(folder)
    return str(folder)


def longbench(folder: Path, names: Any = None, ending: str = "") -> Path:
    """A folder with one case of each data set, in words of the tiny tokenizer."""
    folder.mkdir(exist_ok=True)
    for name in names or [n for n, d in DATASETS.items() if d.extended]:
        metric = DATASETS[name].metric
        answer = {"classification": "Date", "count": "3", "retrieval": "Paragraph 3"}.get(metric)
        record = {"input": "brave", "context": tiny_case(30).prompt, "answers": [answer or WORDS]}
        record |= {"length": 99, "all_classes": CLASSES if metric == "classification" else None}
        write(folder / f"{name}{ending}.jsonl", record)
    return folder


def longeval(folder: Path, lengths: Any = (200, 300, 400)) -> Path:
    folder.mkdir(exist_ok=True)
    for lines in lengths:  # the records have fewer lines than their names say
        case = tiny_case(12, which=lines // 100)
        record = {"prompt": case.prompt, "expected_number": case.expected, "num_lines": lines}
        write(folder / f"{lines}_lines.jsonl", record)
    return folder


def preset(name: str, model: str, data: Path, *words: str) -> dict[str, Any]:
    words = ("eval", "--preset", name, "--model", model, "--data", str(data), *words, "--json")
    found: dict[str, Any] = json.loads(kvsketch(*words).stdout)
    return found


# --- a method's own window -----------------------------------------------------------------------


def test_a_window_is_written_read_and_part_of_what_was_run() -> None:
    setup = parse_method("kcenter:0:0.6144@even+int8")
    assert (setup.window, setup.allocation, setup.bits) == ((0, 0.6144), "even", 8)
    assert setup.label == "kcenter:0:0.6144@even+int8"
    assert parse_method("h2o:4:64").window == (4, 64)
    assert "window" not in parse_method("h2o").identity()  # as in stores of older versions
    identity = json.loads(json.dumps(setup.identity()))
    assert identity["window"] == [0, 0.6144]
    for text in ("h2o:", "h2o:4", "h2o:4:", "h2o:-1:4", "h2o:4:1.5", "h2o:4:8:1", "h2o:a:b"):
        with pytest.raises(InputError, match=re.escape(f"method {text!r}: its window")):
            parse_method(text)
    with pytest.raises(InputError, match="no window"):
        parse_method("exact:0:4")


def test_a_share_of_a_window_is_of_the_tokens_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Setup("h2o", 0.5).window_of(4, 32, 1000) == (4, 32)
    assert Setup("h2o", 0.5, window=(0, 8)).window_of(4, 32, 1000) == (0, 8)
    setup = Setup("kcenter", 0.65, window=(0, 0.6144))
    assert setup.window_of(4, 32, 2053) == (0, 1261)  # the paper's 3,072 of 5,000
    assert setup.window_of(4, 32, 0) == (0, 0)
    assert Setup("h2o", 0.65, window=(0, 0.325)).window_of(4, 32, 2053) == (0, 667)
    # a share never exceeds a budget in slots
    assert Setup("h2o", 100, window=(8, 0.5)).window_of(4, 32, 1000) == (8, 92)
    config, made = tiny_model(40).config, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append((kwargs["sink"], kwargs["recent"]))
        return SketchCache(*args, **kwargs)

    monkeypatch.setattr("kvsketch.evaluation.runner.replies.SketchCache", recorded)
    for wanted in (setup, Setup("kcenter", 0.5)):
        new_cache(config, Settings(), wanted, 1000)
    assert made == [(0, 614), (4, None)]


# --- the papers' protocols -----------------------------------------------------------------------


def test_the_protocols_are_the_papers() -> None:
    """The presets are what the papers print: SubGen section 3.2 and ClusterGen section 4, BalanceKV
    section 4.2, and the caption of ClusterGen's Table 2."""
    subgen, balancekv, clustergen = (
        PRESETS[n] for n in ("subgen-table1", "balancekv-table1", "clustergen-table2")
    )
    assert len(PRESETS) == 3
    for one, table in (
        (subgen, SUBGEN_TABLE_1),
        (balancekv, BALANCEKV_TABLE_1),
        (clustergen, CLUSTERGEN_TABLE_2),
    ):
        assert one.table is table
        assert one.options == {"question": "seen", "prefill": "exact", "one_shot": True}
        first = next(iter(table["results"].values()))
        for lines in one.methods:
            run = one.setups(lines)
            assert {setup.method for setup in run} == set(first)
            assert all(s.budget == one.budgets[lines] for s in run if s.method != "exact")
    assert [(s.label, s.budget) for s in subgen.setups(200)] == [
        ("exact", 1.0),
        ("streaming_llm:4:0", 0.65),
        ("h2o:0:0.325", 0.65),
        ("kcenter:0:0.4096", 0.65),  # 2,048 of 5,000
        ("kcenter:0:0.6144", 0.65),  # 3,072 of 5,000
    ]
    windows = {n: [s.window for s in subgen.setups(n) if s.method == "kcenter"] for n in (300, 400)}
    assert windows == {
        300: [(0, pytest.approx(2048 / 7000, abs=1e-4)), (0, pytest.approx(3072 / 7000, abs=1e-4))],
        400: [(0, pytest.approx(2048 / 9000, abs=1e-4)), (0, pytest.approx(3072 / 9000, abs=1e-4))],
    }
    assert subgen.budgets == {200: 0.65, 300: 0.58, 400: 0.50}
    # the share kept, by the bytes in the paper's table
    for lines, theirs in SUBGEN_TABLE_1["results"].items():
        kept = theirs["kcenter"][0] / theirs["exact"][0]
        assert kept == pytest.approx(subgen.budgets[int(lines)], abs=0.012)

    assert [(s.label, s.budget) for s in clustergen.setups()] == [
        ("exact", 1.0),
        ("streaming_llm:1024:1024", 2048),
        ("kcenter:0:1024", 2048),
    ]
    assert (clustergen.task, clustergen.max_prompt_tokens, clustergen.chat) == (
        "longbench",
        20_000,
        True,
    )
    assert len(clustergen.datasets) == 11
    assert (balancekv.task, balancekv.budgets, balancekv.chat) == ("longbench_e", {0: 0.25}, False)
    assert balancekv.max_prompt_tokens == 100_000
    assert set(balancekv.datasets) == {n for n, d in DATASETS.items() if d.extended}
    seeded = balancekv.setups(seeds=[0, 1])
    assert [s.seed for s in seeded if s.method == "balancekv"] == [0, 1]


# --- what is refused -----------------------------------------------------------------------------

CONTRADICTIONS = [
    ("--budgets 0.25", "the paper kept 2048"),
    ("--sink 3", "streaming_llm:1024:1024"),
    ("--recent 32", "kcenter:0:1024"),  # the default, but given explicitly
    ("--methods h2o", "the paper's are exact, streaming_llm:1024:1024, kcenter:0:1024"),
    ("--question unseen", "the paper's is --question seen"),
    ("--prefill streaming", "the paper's is --prefill exact"),
    ("--max-prompt-tokens 99", "the paper's is --max-prompt-tokens 20000"),
    ("--tolerances 0.1", "no such option"),
    ("--lines 200", "no such option"),
    ("--cases x.jsonl", "no such option"),
    ("longbench", "it runs longbench"),
]


def test_usage_errors_name_both_and_need_no_torch(tmp_path: Path) -> None:
    start = ["eval", "--preset", "clustergen-table2"]
    commands = [[*start, *option.split()] for option, _ in CONTRADICTIONS]
    commands += [
        ["eval", "--preset", "clustergen-table1"],
        [*start, "--data", "none"],
        [*start, "--data", ".", "--datasets", "qasper,musique"],
        [*start, "--limit", "0"],
        [*start, "--model", "./none", "--data", "."],
        ["eval", "--preset", "subgen-table1"],
        ["eval", "--preset", "subgen-table1", "--data", "."],
        ["eval", "--preset", "subgen-table1", "--data", ".", "--datasets", "qasper"],
        ["eval"],
    ]
    said = [
        *((f"--preset clustergen-table2 and {_shown(o)} exclude", m) for o, m in CONTRADICTIONS),
        ("--preset='clustergen-table1' is unknown", "did you mean 'clustergen-table2'"),
        ("--data none holds no records of clustergen-table2 (qasper,", "NAME.jsonl"),
        ("--datasets='musique' is unknown", "Allowed: 2wikimqa"),
        ("--limit 0", "at least 1"),
        ("--model './none' is not a folder", "Hugging Face id"),
        ("LongEval's official cases are not here", "--data (github.com/DachengLi1/LongChat"),
        ("--data . holds no cases of subgen-table1", "200_lines.jsonl"),
        ("--datasets qasper", "subgen-table1 has no data sets"),
        ("Missing argument 'TASK...'", "--preset"),
    ]
    found = outcomes("kvsketch.cli", commands, tmp_path)
    for command, (named, allowed), (code, out, err, heavy) in zip(
        commands, said, found, strict=True
    ):
        assert (code, out, heavy) == (2, "", []), (command, err)
        assert named in err, (command, err)
        assert allowed in err, (command, err)
        assert len(err.splitlines()) == 1


def _shown(option: str) -> str:
    return option if option.startswith("--") else f"the task {option}"


def test_an_option_that_says_the_same_is_no_contradiction() -> None:
    same = {"question": "seen", "one_shot": True, "prefill": "exact", "model": "m", "limit": 3}
    assert find_preset("subgen-table1", same) is PRESETS["subgen-table1"]
    with pytest.raises(InputError, match="one-shot"):  # from a configuration file
        find_preset("subgen-table1", {"one_shot": False})


def test_a_configuration_file_contradicts_too(model: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("preset: clustergen-table2\nbudgets: [0.5]\n", encoding="utf-8")
    assert "--budgets 0.5 exclude each other" in refused("eval", "--config", str(config))


def test_the_archive_is_named_where_it_cannot_be_had(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsketch.evaluation.runner.hub.unreachable", lambda: "no network")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("eval", "--preset", "balancekv-table1", "--model", model)
    assert "data.zip of zai-org/LongBench could not be fetched" in line
    assert "--data" in line


def test_other_lengths_are_not_the_papers(tmp_path: Path) -> None:
    case = tiny_case(12)
    record = {"prompt": case.prompt, "expected_number": case.expected, "num_lines": 12}
    path = write(tmp_path / "cases.jsonl", record)
    with pytest.raises(InputError, match=r"12 lines is not in subgen-table1.* are 200, 300, 400"):
        planned("subgen-table1", cases=[path])


def planned(name: str, **changes: Any) -> Any:
    base = {"data": None, "cases": [], "datasets": [], "limit": None, "seeds": [0]}
    return plan(PRESETS[name], **{**base, "max_new_tokens": None, **changes})


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    pytest.importorskip("rouge")
    folder = tmp_path_factory.mktemp("whole")
    data, out = longbench(folder / "data"), folder / "run.jsonl"
    return preset("clustergen-table2", model, data, "--out", str(out)), out


@pytest.mark.slow
def test_clustergen_is_run_whole(whole: tuple[dict[str, Any], Path]) -> None:
    shown, out = whole
    assert (shown["command"], shown["preset"]) == (
        "eval --preset clustergen-table2",
        "clustergen-table2",
    )
    assert (shown["missing"], shown["settings"]["one_shot"]) == ([], True)
    assert (shown["settings"]["sink"], shown["settings"]["recent"]) == (0, 0)  # methods override it
    assert shown["settings"]["max_prompt_tokens"] is None  # the model has 1,024 positions
    assert any("1,024 positions" in note for note in shown["notes"])
    assert "Nothing was compressed in longbench/qasper" in shown["notes"][-1]  # budget: 2,048 slots
    (table,) = shown["published"]
    rows = {(row["task type"], row["method"]): row for row in table["rows"]}
    theirs = CLUSTERGEN_TABLE_2["results"]
    assert set(rows) == {(kind, method) for kind in theirs for method in theirs[kind]}
    for (kind, method), row in rows.items():
        assert row["paper"] == f"{theirs[kind][method]:.2f}"
        assert NOT_RUN not in row["ours [95%]"]
        assert row["our cases"] == str(len(CLUSTERGEN_TABLE_2["datasets"][kind]))
    scores = {
        record.result["group"]["dataset"]: record.result["score"]
        for record in Store(out, write=False)
        if record.identity["method"] == "kcenter"
    }
    total = sum(scores[name] for name in CLUSTERGEN_TABLE_2["datasets"]["Summarization"])
    assert total > 0
    ours = rows["Summarization", "kcenter"]["ours [95%]"]
    assert float(ours.split()[0]) == pytest.approx(100 * total, abs=0.051)  # a sum, not a mean
    windows = {r.identity["method"]: r.identity.get("window") for r in Store(out, write=False)}
    assert windows == {"exact": None, "streaming_llm": [1024, 1024], "kcenter": [0, 1024]}


def test_the_same_command_goes_on(
    whole: tuple[dict[str, Any], Path], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, out = whole
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])  # killed while writing
    again = preset("clustergen-table2", model, out.parent / "data", "--out", str(out))
    assert [r["score"] for r in again["results"]] == [r["score"] for r in shown["results"]]

    def never(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load_model", never)
    assert preset("clustergen-table2", model, out.parent / "data", "--out", str(out))["published"]


def test_what_is_there_is_run_and_what_is_missing_named(model: str, tmp_path: Path) -> None:
    """Data sets whose files are missing are named. Where only LongBench has a data set, its records
    are run in place of LongBench-E's, under their own name."""
    pytest.importorskip("rouge")
    data = longbench(tmp_path / "data", ["lcc", "repobench-p", "multi_news"])
    longbench(data, ["lcc"], "_e")
    out = tmp_path / "run.jsonl"
    words = ("--max-new-tokens", "8", "--seeds", "0,1", "--out", str(out))
    shown = preset("balancekv-table1", model, data, *words)
    answers = {row["method"].partition(":")[0]: row["answers"] for row in shown["results"]}
    assert (answers["exact"], answers["balancekv"], answers["uniform"]) == (1, 2, 2)
    assert {row["task"] for row in shown["results"]} == {
        "longbench_e/lcc",
        "longbench/repobench-p",
        "longbench/multi_news",
    }
    assert len(shown["missing"]) == 10
    assert "qasper: qasper_e.jsonl is not there" in shown["missing"]
    assert any("repobench-p.jsonl stands in" in note for note in shown["notes"])
    assert not any("Nothing was compressed" in note for note in shown["notes"])
    assert any("at most 8 tokens (--max-new-tokens)" in note for note in shown["notes"])
    (table,) = shown["published"]
    ours = {(row["task type"], row["method"]): row["ours [95%]"] for row in table["rows"]}
    assert len(ours) == 7 * 6
    for (kind, _), cell in ours.items():
        expected = {"Summarization": f"{NOT_RUN}: gov_report", "Code": None}.get(kind, NOT_RUN)
        assert cell == expected if expected else NOT_RUN not in cell
    kept = {row["slots"] for row in shown["results"] if row["method"] != "exact"}
    tokens = {row["prompt_tokens"] for row in shown["results"]}
    assert max(kept) <= 0.25 * max(tokens) + 1
    (run,) = read_runs([out])
    assert run.common["preset"] == "balancekv-table1"
    html = build([out]).html
    assert "BalanceKV paper, LongBench-E" in html
    assert f"{NOT_RUN}: gov_report" in html
    assert "first tokens kept" not in html  # the windows are part of the methods' names


def test_subgen_shows_the_better_window(model: str, tmp_path: Path) -> None:
    data, out = longeval(tmp_path / "data", (200, 400)), tmp_path / "run.jsonl"
    shown = preset("subgen-table1", model, data, "--max-new-tokens", "4", "--out", str(out))
    assert shown["missing"] == ["300 lines: 300_lines.jsonl is not there"]
    assert [row["method"] for row in shown["results"] if row["lines"] == 400] == [
        "exact",
        "streaming_llm:4:0",
        "h2o:0:0.25",
        "kcenter:0:0.2276",
        "kcenter:0:0.3413",
    ]
    (table,) = shown["published"]
    rows = {(row["lines"], row["method"].partition(":")[0]): row for row in table["rows"]}
    assert rows["300", "h2o"]["ours [95%]"] == NOT_RUN
    assert rows["200", "kcenter"]["paper"] == "0.86"


@pytest.mark.parametrize("better", [0.4096, 0.6144])
def test_of_several_windows_the_better_one_stands_beside_the_paper(
    better: float, tmp_path: Path
) -> None:
    def made(setup: Setup, score: float) -> Record:
        record = record_of(setup, score, group={"lines": 200}, kv_bytes=1300.0)
        return Record({**record.identity, "model_fingerprint": "f", "kvsketch": "0"}, record.result)

    setups = [Setup("kcenter", 0.65, window=(0, share)) for share in (0.4096, 0.6144)]
    found = [made(setup, float(setup.window == (0, better))) for setup in setups]
    with Store(tmp_path / "a.jsonl") as store:
        for record in found:
            store.add(record)
    (run,) = read_runs([tmp_path / "a.jsonl"])
    assert len(run.rows) == 2  # different windows are rows of one run
    from kvsketch.evaluation.report.published_panel import beside

    (grid,) = beside(run)
    (line,) = grid.rows
    assert line[:3] == ["200", f"kcenter:0:{better}", "0.86"]
    assert line[4].startswith("1.00")


@pytest.mark.parametrize(("positions", "longest"), [(20_512, 20_000), (20_511, None)])
def test_prompts_are_cut_where_the_paper_cut_them_or_the_model_has_to(
    positions: int, longest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are cut to the paper's 20,000 tokens, or to the model's limit if 20,000 tokens and
    the 512 of a summary exceed its positions."""
    pytest.importorskip("rouge")
    found = planned("clustergen-table2", data=longbench(tmp_path / "data", ["multi_news"]))
    config = tiny_model(40).config
    config.max_position_embeddings = positions
    monkeypatch.setattr(loading, "resolve_model", str)
    monkeypatch.setattr(loading, "load_config", lambda _: config)
    again, cut = fitted_prompts(found, "m", None)
    assert cut == longest
    assert (again.notes == found.notes) is (longest is not None)


def test_balancekv_asks_without_a_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("rouge")
    data = longbench(tmp_path / "data", ["qasper"])
    longbench(data, ["qasper"], "_e")
    for name, chat in (("balancekv-table1", False), ("clustergen-table2", True)):
        (case,) = planned(name, data=data).tasks[0].cases()
        assert case.details["chat"] is chat


def test_an_answer_that_leaves_no_room_is_said(model: str, tmp_path: Path) -> None:
    pytest.importorskip("rouge")
    data = longbench(tmp_path / "data", ["multi_news"])
    words = ("eval", "--preset", "clustergen-table2", "--model", model, "--data", str(data))
    line = refused(*words, "--max-new-tokens", "1024")
    assert "multi_news.jsonl:1: an answer of 1024 tokens leaves no room" in line
    assert "1024 positions" in line


def test_help_has_an_example_of_a_preset() -> None:
    shown = " ".join(kvsketch("eval", "--help").stdout.split())
    assert "kvsketch eval --preset clustergen-table2 --model YOUR_MODEL" in shown
    for name in PRESETS:
        assert name in shown
