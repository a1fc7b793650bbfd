"""What the timings time runs; what it takes is for docs/."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks import speed
from kvsketch import SketchCache


def test_a_prompt_and_its_answer_are_timed_with_every_cache() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = speed.prompt(model, 300, seed=0)
    for cache in (SketchCache(config, budget=0.25), DynamicCache(config=config)):
        times = speed.generated(model, cache, ids, 20)
        assert all(0 < seconds < math.inf for seconds in times)
        assert cache.get_seq_length() == 300 + 1 + 4 + 20 - 1


def test_a_timing_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is kept as soon as it is measured: the longest preset takes half an hour."""
    out, measured = tmp_path / "speed.json", list[int]()

    def part(number: int) -> speed.Rows:
        if number == 2 and 2 not in measured:
            measured.append(2)
            raise KeyboardInterrupt
        measured.append(number)
        return [{"model": "tiny", "tokens": number}]

    parts = [partial(part, number) for number in range(4)]
    monkeypatch.setattr(speed, "end_to_end", lambda *args: parts)
    monkeypatch.setattr(speed, "floors", lambda: {"copy_bytes_per_second": 1.0})
    command = ["--preset", "end_to_end", "--tokens", "300", "--threads", "1", "--out", str(out)]
    app = typer.Typer()
    app.command()(speed.main)
    assert CliRunner().invoke(app, command).exit_code != 0
    found = json.loads(out.read_text())
    assert not found["complete"]
    assert [row["tokens"] for row in found["results"]] == [0, 1]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = json.loads(out.read_text())
    assert found["complete"]
    assert found["floors"]
    assert [row["tokens"] for row in found["results"]] == [0, 1, 2, 3]
    assert measured == [0, 1, 2, 2, 3]
