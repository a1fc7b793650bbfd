"""BalanceKV's figure 2: the protocol as printed, and the pages' text about it."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import figure2, page_balance, sketch_budget
from benchmarks.markdown import folded
from benchmarks.page import DOCS
from kvsketch import Slots
from kvsketch.hf.activations import Activations
from kvsketch.methods import BalanceKV, Uniform


def caught(n, heads=2, dim=4):
    g = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, n, dim, generator=g) for _ in range(3))
    return Activations(3, queries, keys, values, scaling=dim**-0.5)


class Watched:
    """A sampler that records its arguments."""

    def __init__(self):
        self.asked = []

    def __call__(self, seed):
        def compress(middle, budget):
            self.asked.append((seed, middle, budget))
            return Uniform(seed)(middle, budget)

        return compress


def test_the_protocol_is_section_4_1s():
    """Of n tokens the first 256 and, for each query, those from n - 256 on are exact; 2^-T of the
    others are kept, T = 1..4, rounded down; the error is over all 256 queries and all heads
    together."""
    seen = caught(1500)
    watched = Watched()
    errors = figure2.layer_errors(
        seen, figure2.KEPT, figure2.RATES, {"balancekv c=30": watched}, range(2)
    )
    assert [(s, b) for s, _, b in watched.asked] == [
        (s, 988 >> t) for t in (1, 2, 3, 4) for s in (0, 1)
    ]
    middle = watched.asked[0][1]
    assert torch.equal(middle.keys, seen.keys[:, :, 256:1244])
    # the same by a plain softmax over the kept tokens
    kept = Uniform(1)(middle, 988 >> 2)
    wanted, exact = [], []
    for j in range(1244, 1500):
        parts = [seen.keys[:, :, :256], kept.keys, seen.keys[:, :, 1244 : j + 1]]
        values = [seen.values[:, :, :256], kept.mean_values(), seen.values[:, :, 1244 : j + 1]]
        mass = torch.cat([torch.ones(1, 2, 256), kept.masses(), torch.ones(1, 2, j - 1243)], dim=2)
        query = seen.queries[:, :, j]
        scores = torch.einsum("bhd,bhnd->bhn", query, torch.cat(parts, dim=2)) / 2 + mass.log()
        wanted.append(torch.einsum("bhn,bhnd->bhd", scores.softmax(-1), torch.cat(values, dim=2)))
        scores = torch.einsum("bhd,bhnd->bhn", query, seen.keys[:, :, : j + 1]) / 2
        weights = scores.softmax(-1)
        exact.append(torch.einsum("bhn,bhnd->bhd", weights, seen.values[:, :, : j + 1]))
    wanted, exact = torch.stack(wanted), torch.stack(exact)
    error = float((wanted - exact).norm() / exact.norm())
    assert errors["balancekv c=30", 2][1] == pytest.approx(error, rel=1e-4)


def test_what_is_compared():
    found = figure2.samplers([30.0, 0.5], block=64)
    assert list(found) == ["uniform", "uniform, unweighted", "balancekv c=30", "balancekv c=0.5"]
    made = found["balancekv c=0.5"](7)
    assert isinstance(made, BalanceKV)
    assert (made.constant, made.block, made.seed) == (0.5, 64, 7)
    assert figure2.samplers(figure2.CONSTANTS)["balancekv c=30"](0).block == 256
    g = torch.Generator().manual_seed(0)
    slots = Slots(torch.randn(1, 1, 64, 4, generator=g), torch.randn(1, 1, 64, 4, generator=g))
    for name, total in (("uniform", 64.0), ("uniform, unweighted", 16.0)):
        kept = figure2.compressed(slots, name, found[name], 2, 0)
        assert float(kept.masses().sum()) == pytest.approx(total)


def test_records_are_read_in_longbenchs_prompt(tmp_path):
    class Letters:
        def __call__(self, text, return_tensors):
            ids = torch.tensor([[ord(c) for c in text]])
            return type("Encoded", (), {"input_ids": ids})

    file = tmp_path / "triviaqa.jsonl"
    file.write_text(json.dumps({"context": "C" * 50, "input": "Question?"}) + "\n")
    (whole,) = figure2.records_of(Letters(), file, 10_000, 3)
    text = "".join(map(chr, whole[0].tolist()))
    assert text.endswith("\n\n" + "C" * 50 + "\n\nQuestion?")
    (cut,) = figure2.records_of(Letters(), file, 60, 3)
    assert "".join(map(chr, cut[0].tolist())) == text[:30] + text[-30:]


def test_one_command_per_model_resumes_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(figure2, "CONSTANTS", (30.0, 1e-6))
    app, out = CliRunner(), tmp_path / "figure2.json"
    import typer

    command = typer.Typer()
    command.command()(figure2.main)
    options = ["--model", "longeval-one-head", "--layers", "1", "--prompts", "1", "--seeds", "2"]
    done = app.invoke(command, [*options, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["results"]
    assert {(r["layer"], r["rate"]) for r in rows} == {
        (x, t) for x in (1, "all") for t in (1, 2, 3, 4)
    }
    assert {r["kept_at_ends"] for r in rows} == {256}
    page = page_balance._by_layer(rows, rows[0]["source"])
    assert page.count("| 1/2 |") == 2
    missing = app.invoke(command, [*options, "--records", str(tmp_path / "no.jsonl")])
    assert missing.exit_code == 2


def test_the_page_says_what_comes_out():
    file = DOCS / "results" / "figure2.json"
    result = json.loads(file.read_text())
    section = page_balance.figure2(result)
    assert folded(section) in (DOCS / "errors.md").read_text()
    models = [r for r in result["results"] if r["part"] == "model"]
    alone = [r for r in models if r["layer"] != "all"]
    for sampler in ("balancekv c=30", "uniform"):
        assert {r["rate"] for r in alone if r["sampler"] == sampler} == {1, 2, 3, 4}
    assert result["seeds"] == 10
    assert "fair coins" in section


def test_the_page_of_budgets_is_what_was_measured():
    result = json.loads((DOCS / "results" / "sketch_budget.json").read_text())
    section = folded(page_balance.sketch_budget(result))
    assert section in (DOCS / "benchmarks.md").read_text()
    budget = [r for r in result["results"] if r["part"] == "budget"]
    assert {r["tokens"] for r in budget} == {512, 2048, 16_384, 131_072}
    for row in budget:  # the bounds of issue 13
        assert row["bytes_used"] >= 0.9
        assert abs(row["least_mass"] - 1) <= 0.1
        assert abs(row["most_mass"] - 1) <= 0.1
        assert row["most_over_balancekv"] <= 2
    for row in result["results"]:
        if row["part"] == "generate":
            assert row["most"] <= 1.05


@pytest.mark.slow
def test_budgets_are_measured(tmp_path):
    import typer

    command = typer.Typer()
    command.command()(sketch_budget.main)
    out = tmp_path / "budget.json"
    options = ["--tokens", "512", "--prompts", "512", "--seeds", "1", "--new", "8"]
    done = CliRunner().invoke(command, [*options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["results"]
    assert {r["part"] for r in rows} == {"budget", "generate"}
    assert all(r["most"] <= 1.05 for r in rows if r["part"] == "generate")
