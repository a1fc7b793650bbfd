"""Rows of a later run replace those of a stored result if the settings are the same."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import replace_rows
from benchmarks.markdown import made_with


def result(errors, **other):
    """A result with rows of two sources for each method."""
    rows = [
        {"method": method, "source": source, "kept": 0.5, "relative_error": error, "seeds": 1}
        for method, error in errors.items()
        for source in ("a", "b")
    ]
    run = {"versions": {"kvsketch": "1"}, "hardware": {"processor": "P"}, "methods": list(errors)}
    return {"command": "x", "seed": 0, **run, "complete": True, "results": rows, **other}


BEFORE = {"snapkv": 0.5, "heavy_merge": 0.25, "h2o": 0.75}


def test_only_changed_methods_are_replaced_and_the_others_compared():
    before = result(BEFORE)
    errors = {"heavy_merge": 0.125, "snapkv": 0.5625, "tova": 0.875}
    later = result(errors, hardware={"processor": "Q"})
    found = replace_rows.replaced(before, later, ["snapkv"])
    errors = [(row["method"], row["relative_error"]) for row in found["results"]]
    assert errors == [(name, value) for name, value in
                      (("snapkv", 0.5), ("heavy_merge", 0.125), ("h2o", 0.75), ("tova", 0.875))
                      for _ in "ab"]  # fmt: skip
    assert found["again"]["methods"] == ["heavy_merge", "tova"]
    assert found["methods"] == ["snapkv", "heavy_merge", "h2o", "tova"]
    assert found["again"]["differences"] == {"relative_error": 0.0625}
    assert found["hardware"] == {"processor": "P"}
    said = made_with(found)
    assert "`heavy_merge`, `tova` are from a later run of kvsketch 1, on Q." in said
    assert "For `snapkv`, the two runs differ by at most 0.0625 in `relative_error`." in said
    assert "later" not in made_with(before)
    for processor, names in (("Q", ["heavy_merge", "tova", "h2o"]), ("R", ["h2o"])):
        last = result({"h2o": 0.25}, hardware={"processor": processor})
        assert replace_rows.replaced(found, last, [])["again"]["methods"] == names


@pytest.mark.parametrize(
    ("change", "control", "message"),
    [
        ({"seed": 1}, [], "the runs differ in seed"),
        ({"complete": False}, [], "not complete"),
        ({}, ["h2o"], "the later run has no h2o"),
        ({"results": result({"heavy_merge": 0.1})["results"][:1]}, [], "the later run lacks"),
    ],
)
def test_other_runs_are_refused(tmp_path, change, control, message):
    later = result({"heavy_merge": 0.1}, **change)
    with pytest.raises(ValueError, match=message):
        replace_rows.replaced(result(BEFORE), later, control)
    paths = [tmp_path / "before.json", tmp_path / "later.json"]
    for path, content in zip(paths, (result(BEFORE), later), strict=True):
        path.write_text(json.dumps(content))
    app = replace_rows.typer.Typer()
    app.command()(replace_rows.main)
    done = CliRunner().invoke(app, [*map(str, paths), "--control", ",".join(control)])
    assert done.exit_code == 2
    assert json.loads(paths[0].read_text()) == result(BEFORE)
