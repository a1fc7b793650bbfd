"""The commands, with small models of families that have other layers beside full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import tiny_models
from kvsketch.cli.app import app
from tiny_model import tiny_case, tiny_tokenizer

FAMILIES = ["gemma3_text", "gemma4_text", "qwen3_next", "deepseek_v3", "lfm2", "gpt_oss"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with random weights and a tokenizer."""
    tokenizer, config = tiny_tokenizer(), tiny_models.config_of(request.param)
    assert len(tokenizer) <= config.vocab_size
    config.max_position_embeddings = 4096
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*words: Any, code: int = 0, given: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], input=given)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize("queries", ["prompt", "sample", "reread"])
def test_a_document_is_compressed_and_asked(model: Path, queries: str, tmp_path: Path) -> None:
    text, out = tmp_path / "doc.txt", tmp_path / "doc.kvs"
    text.write_text(tiny_case(30).prompt)
    run("compress", text, "-o", out, "--model", model, "--queries", queries)
    run("ask", out, "what is it?", "--max-new-tokens", 4)
    run("info", out)
    run("append", out, text, "-o", tmp_path / "more.kvs")


@pytest.mark.slow
def test_curves_that_were_measured_are_used(model: Path, tmp_path: Path) -> None:
    text, curves = tmp_path / "doc.txt", tmp_path / "curves.json"
    text.write_text(tiny_case(30).prompt)
    if model.name == "deepseek_v3":
        said = run("calibrate", text, "--model", model, "--out", curves, code=2)
        assert "latents" in said
        return
    run("calibrate", text, "--model", model, "--out", curves)
    run("compress", text, "-o", tmp_path / "doc.kvs", "--model", model, "--allocation", curves)


@pytest.mark.slow
@pytest.mark.parametrize("question", ["seen", "unseen"])
def test_methods_are_compared(model: Path, question: str, tmp_path: Path) -> None:
    """With batches, where the question is part of the prompt."""
    words = [
        "eval",
        "longeval",
        "--model",
        model,
        "--num-cases",
        2,
        "--lines",
        20,
        "--budgets",
        0.5,
    ]
    words += ["--question", question, "--out", tmp_path / "run", "--json"]
    words += ["--queries", "sample"] if question == "unseen" else ["--batch-size", 2]
    said = run(*words, "--methods", "exact,heavy_merge,streaming_llm")
    found = json.loads(said.splitlines()[-1])
    assert {row["method"] for row in found["results"]} == {"exact", "heavy_merge", "streaming_llm"}
    run("report", tmp_path / "run", "-o", tmp_path / "report.html")


@pytest.mark.slow
def test_a_conversation(model: Path) -> None:
    run("chat", "--model", model, "--max-new-tokens", 4, given="hello there\nhow are you\n/quit\n")
