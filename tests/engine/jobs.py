"""Requests of the tests in this folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import vllm_engine as engine
from benchmarks.longeval import cases
from kvsketch.evaluation.runner.loading import resolve_model


def seams(values: Iterable[str], chosen: str) -> list[Any]:
    """Values of a parametrized test, one of which is run with every release of vLLM."""
    return [pytest.param(one, marks=pytest.mark.seams) if one == chosen else one for one in values]


def asked(count: int, tokens: int = 12, lines: int = 200) -> list[dict]:
    """LongEval questions, 200 lines of which are about 1,700 tokens."""
    _, rows = cases(lines, count, 0)
    return [{"prompt": row["prompt"], "max_tokens": tokens} for row in rows]


def right(found: dict, count: int) -> int:
    """How many of their answers are right."""
    return engine.right(cases(200, count, 0)[1], [answer["text"] for answer in found["answers"]])


def about_documents(count: int) -> list[dict]:
    """Requests with a document alone, then with questions about it, some of which are about a
    shortened document."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(engine.MODEL))
    found = []
    for row in cases(200, count, 0)[1]:
        prompt = tokenizer(row["prompt"]).input_ids
        document, question = prompt[:-60], prompt[-60:]
        found.append({"prompt": document, "max_tokens": 1})
        for cut in (0, 5, 9):
            found.append({"prompt": document[: len(document) - cut] + question, "max_tokens": 12})
    return found


def adapter(folder: Path, seed: int) -> str:
    """A random LoRA adapter of the queries and values, which changes the answers."""
    config = json.loads((Path(resolve_model(engine.MODEL)) / "config.json").read_text())
    out = folder / str(seed)
    out.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_"
            shapes = {"A": (8, config["hidden_size"]), "B": (config[heads] * config["head_dim"], 8)}
            for half, shape in shapes.items():
                tensors[f"{start}{half}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, out / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (out / "adapter_config.json").write_text(json.dumps(said))
    return str(out)
