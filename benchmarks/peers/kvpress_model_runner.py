"""Runs kvpress's presses that need a whole model, in the peers' interpreter.

    python kvpress_model_runner.py request.json in.safetensors out.safetensors

The request is ``{"model": folder, "texts": the texts on which DuoAttention measures heads or null,
"jobs": [{"press": class name, "arguments": those of its constructor, "inner": class name of the
wrapped press or null, "inner_arguments": those of its constructor, "ratio": compression_ratio}]}``.
Job i reads the context ``ids.i``, int64 ``[1, n]``, and writes ``kept.i``, bool ``[layers,
num_key_value_heads, n]``, the tokens that the press did not mask. If there are texts, ``scores``
are DuoAttention's, float ``[layers, num_key_value_heads]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvpress
import torch
from kvpress.presses import duo_attention_press
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache


class Texts:
    """Replaces the data set that kvpress would download."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def to_pandas(self) -> Texts:
        return self

    def sample(self, count: int, random_state: int) -> dict[str, Texts]:
        assert len(self.texts) == count
        return {"chapter": self}

    def tolist(self) -> list[str]:
        return self.texts


def press_of(job: dict[str, Any]) -> Any:
    cls = getattr(kvpress, job["press"])
    if job["press"] == "DuoAttentionPress":
        return cls(**job["arguments"])
    if job["inner"] is None:
        return cls(compression_ratio=job["ratio"], **job["arguments"])
    inner = getattr(kvpress, job["inner"])(compression_ratio=job["ratio"], **job["inner_arguments"])
    return cls(inner, **job["arguments"])


def main() -> None:
    request, source, target = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    tensors = load_file(source)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    model.config.name_or_path = asked["model"]  # KVzip loads the tokenizer from here.
    found = {}
    if asked["texts"] is not None:
        duo_attention_press.load_dataset = lambda *_, **__: Texts(asked["texts"])
        scores = duo_attention_press.duo_attention_on_the_fly(model)
        found["scores"] = torch.from_numpy(scores).clone()
    for i, job in enumerate(asked["jobs"]):
        ids = tensors[f"ids.{i}"]
        grad = "grad" in job["press"].lower()
        with torch.set_grad_enabled(grad), press_of(job)(model):
            model.model(input_ids=ids, past_key_values=DynamicCache())
        heads = model.config.num_key_value_heads
        kept = torch.ones(len(model.model.layers), heads, ids.shape[1], dtype=torch.bool)
        for number, layer in enumerate(model.model.layers):
            _, head, token = layer.self_attn.masked_key_indices
            kept[number, head.cpu(), token.cpu()] = False
            layer.self_attn.masked_key_indices = None
        found[f"kept.{i}"] = kept
    save_file(found, target)


if __name__ == "__main__":
    main()
