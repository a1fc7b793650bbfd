"""Benchmarks of a second reading at small sizes, and the sections of the pages made from them."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import longeval, page_reread, reading
from benchmarks.results import Results
from tiny_model import small_llama


def invoke(command, *arguments, code=0):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.splitlines()[-1]) if code == 0 else done.output


def test_what_a_second_reading_costs(monkeypatch, tmp_path):
    monkeypatch.setattr(
        reading, "models", lambda: {"longeval-one-head": lambda: small_llama().eval()}
    )
    monkeypatch.setattr(
        reading, "AutoTokenizer", type("", (), {"from_pretrained": lambda _: Letters()})
    )
    monkeypatch.setattr(reading, "prompt", lambda model, tokens, seed: ids_of(tokens))
    names = [f"heavy_merge{end}" for end in ("", "/reread", "/local", "/sample")]
    found = [{"method": name, "budget": 0.3, "accuracy": 0.5, "cases": 2} for name in names]
    beside = tmp_path / "longeval.json"
    found.append(found[1] | {"method": "kvzip/reread"})  # a method with one mode only
    beside.write_text(json.dumps({"lines": 30, "results": found}), encoding="utf-8")
    arguments = ["--tokens", "300", "--repeats", "1", "--beside", str(beside)]
    result = invoke(reading.main, *arguments)
    rows = {row["queries"]: row for row in result["results"]}
    assert list(rows) == ["prompt", "reread", "local", "sample"]
    assert rows["prompt"]["second_over_first"] == 0
    for queries in ("reread", "local", "sample"):
        row = rows[queries]
        assert row["second_over_first"] > 0 < row["compress_over_first"]
        assert row["layer_over_first"] > 0
        assert 0 < row["of_32_over_first"] < 1.1 * row["layer_over_first"]
    assert [row["queries"] for row in result["accuracy"]] == list(rows)
    assert result["versions"]["torch"]
    peers = {row["method"]: row["whole_over_first"] for row in result["peers"]}
    assert list(peers) == ["heavy_merge", "kvzip", "kvzip_plus", "kvgrad"]
    assert all(ratio > 1 for ratio in peers.values())
    page = page_reread.reading(result)
    assert f"`kvgrad` {peers['kvgrad']:.1f}." in page
    assert f"| sample | {rows['sample']['second_over_first']:.2f} |" in page
    assert "| heavy_merge at 0.3 |" in page
    assert "kvzip at" not in page


def test_accuracies_that_are_not_there_are_named():
    assert "--beside" in invoke(reading.main, "--beside", "nowhere.json", code=2)


def ids_of(tokens):
    import torch

    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(0))


class Letters:
    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


@pytest.mark.parametrize("option", ["--tokens", "--repeats", "--threads"])
def test_numbers_out_of_range_are_named(option):
    assert option in invoke(reading.main, option, "-1", code=2)


@pytest.mark.slow
def test_longeval_after_a_second_reading_at_equal_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(longeval, "OFFICIAL", tmp_path)
    methods = "kvzip/reread,kvzip+int4/reread,heavy_merge@global/reread"
    arguments = ["--lines", "60", "--count", "2", "--budgets", "0.3", "--methods", methods]
    result = invoke(longeval.main, *arguments)
    rows = {row["method"]: row for row in result["results"]}
    most = max(row["bytes_per_token"] for row in rows.values())
    assert most <= 0.3 * 128 * 1.01
    assert rows["kvzip+int4/reread"]["accuracy"] == 1
    plain, fewer = rows["kvzip/reread"], rows["kvzip+int4/reread"]
    assert fewer["slots_per_token"] > 1.5 * plain["slots_per_token"]
    again = {"queries": "reread", "second_over_first": 2.25, "of_32_over_first": 1.125}
    peers = [{"method": name, "whole_over_first": x} for name, x in (("kvzip", 3), ("kvgrad", 9))]
    costs = {"results": [again, again], "peers": peers}
    section = page_reread.longeval_reread(result, costs)
    assert "| kvzip+int4/reread | 1.00 (" in section
    assert "| 2.25 / 1.12 |" in section
    assert "takes 9.0 times the first reading, that of `kvzip` 3.0." in section
    assert "by what is read again: all of it, as a whole 1.00 (`" in section
    without = page_reread.longeval_reread(result, {"results": [], "peers": []})
    assert "2.25 / 1.12" not in without


def test_rows_outlive_another_list_of_methods(tmp_path):
    out = tmp_path / "rows.json"
    first = Results(out, methods=["a", "b"], seed=1)
    first.add([{"method": "a", "x": 1}])
    first.add([{"method": "b", "x": 2}])
    assert Results(out, methods=["a", "b"], seed=1).rows == first.rows
    assert Results(out, methods=["c", "a"], seed=1).rows == [{"method": "a", "x": 1}]
    assert Results(out, methods=["a", "b"], seed=2).rows == []
    first.finish()
    assert Results(out, methods=["a", "b"], seed=1).rows == []  # finished: a new run
    assert Results(out, methods=["b"], seed=1).rows == [{"method": "b", "x": 2}]


def test_the_best_method_is_told_by_what_is_read_again():
    rows = [("a", 0.1, 0.2), ("b", 0.1, 0.4), ("c/sample", 0.1, 0.9), ("d/reread", 0.2, 0.7)]
    result = {"results": [{"method": m, "budget": b, "accuracy": x} for m, b, x in rows]}
    lines = page_reread.decisions(result).splitlines()
    assert lines[2:] == [
        "| nothing |  | b: 0.40 |",
        "| a sixth of it |  | c/sample: 0.90 |",
        "| all of it, as a whole | d/reread: 0.70 |  |",
    ]
