"""Models whose layers are on different devices, by transformers' ``device_map`` and accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kvsketch import SketchCache
from kvsketch.cli.app import app
from tiny_model import save_tiny_model, small_llama, tiny_case

pytest.importorskip("accelerate", reason="device_map needs accelerate")

#: the device of the second layer; the first is on the CPU
PLACES = [
    "disk",  # its weights are loaded for every forward
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
TOKENS, NEW = 300, 12
SETUPS: dict[str, dict[str, Any]] = {
    "snapkv": {"method": "snapkv", "budget": 0.3},
    "uniform": {"method": "uniform", "budget": 90},
    "streaming prefill": {"method": "balancekv", "budget": 90, "prefill": "streaming"},
    "int4": {"method": "streaming_llm", "budget": 0.3, "bits": 4},
    "measured": {"method": "heavy_merge", "budget": 0.3},
    "bounded": {"method": "heavy_merge", "tolerance": 0.2, "budget": 0.5},
}


def test_eval_lets_transformers_place_the_layers(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(tiny_case(60).prompt * 10, encoding="utf-8")
    rows = []
    for device in ("auto", "cpu"):
        words = ["eval", "kl", "attention_error", "--model", folder, "--device", device, "--json"]
        words += ["--data", str(tmp_path / "text.txt"), "--lengths", "200", "--num-cases", "1"]
        words += ["--max-new-tokens", "20", "--methods", "heavy_merge", "--budgets", "0.3"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        rows.append(json.loads(result.stdout.splitlines()[-1])["results"])
    scores = [[row["score"] for row in found] for found in rows]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert len(scores[0]) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    small_llama().save_pretrained(found)
    return found


def answer(model: Any, setup: dict[str, Any]) -> tuple[list[int], SketchCache]:
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    cache = SketchCache(model.config, **setup)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        prefill_chunk_size=64 if "prefill" in setup else None,
    )
    return out[0, TOKENS:].tolist(), cache


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("place", PLACES)
def test_layers_in_two_places_answer_as_in_one(folder: Path, place: str, name: str) -> None:
    # float64, so that rounding on two devices cannot lead to different tokens
    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    names = [part for part, _ in one.named_children() if part != "model"]
    names += [f"model.{part}" for part, _ in one.model.named_children() if part != "layers"]
    device_map = dict.fromkeys(names, "cpu") | {"model.layers.0": "cpu", "model.layers.1": place}
    two = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        device_map=device_map,
        offload_folder=folder / "offloaded",
    ).eval()
    assert set(two.hf_device_map.values()) == {"cpu", place}
    expected, exact = answer(one, SETUPS[name])
    found, cache = answer(two, SETUPS[name])
    assert found == expected
    assert cache.summary() == exact.summary()
    assert cache.summary()["kv_bytes"] < 0.9 * cache.summary()["exact_kv_bytes"]
    if place != "disk":
        assert cache.layers[1].keys.device.type == place
