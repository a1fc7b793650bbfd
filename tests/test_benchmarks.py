"""The benchmarks run as a user runs them, at small sizes; full-size results are in docs/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments, ok=True):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if ok else done.stderr


def test_growth_measures_every_sketch(tmp_path):
    figure = tmp_path / "growth.svg"
    result = run(
        "benchmarks.growth",
        "--largest",
        "4096",
        "--no-million",
        "--json",
        "--plot",
        str(figure),
    )
    rows = {(r["sketch"], r["n"]): r for r in result["results"]}
    assert len(rows) == 2 * len(result["exponents"])
    for name, found in result["exponents"].items():
        if name != "balancekv_streaming":  # logarithmic: no power at such lengths
            assert found["bytes"] <= 0.55 or name == "merge_reduce", (name, found)
    for name in ("sliding_window", "sliding_window_sampled"):
        assert rows[name, 1024]["bytes"] == rows[name, 4096]["bytes"]
    # a level more per doubling, at most a batch for each of the instances
    assert rows["merge_reduce", 4096]["slots"] <= 256 * 6
    assert figure.read_text().startswith("<?xml")


def test_growth_names_a_wrong_sketch():
    assert "subgn" in run("benchmarks.growth", "--sketches", "subgn", ok=False)


@pytest.mark.slow
def test_guarantee_holds_at_the_calculated_parameters(tmp_path):
    figure = tmp_path / "guarantee.svg"
    result = run(
        "benchmarks.guarantee",
        "--trials",
        "20",
        "--balance-trials",
        "2",
        "--rows",
        "128",
        "--json",
        "--plot",
        str(figure),
    )
    assert {r["sketch"] for r in result["results"]} == {"subgen", "balancekv_streaming"}
    for row in result["results"]:
        assert row["failures"] == 0
        assert 0 < row["median_eps"] < row["eps"]
    index = {row["method"]: row for row in result["index"]}
    assert index["exact"]["advantage"] == 1.0
    for name, row in index.items():
        assert name == "exact" or row["advantage"] < 0.4, row
    assert any("says nothing useful" in row["subgen"] for row in result["real"])
    assert figure.exists()
