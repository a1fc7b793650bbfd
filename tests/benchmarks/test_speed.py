"""What the timings time runs; what it takes is for docs/."""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

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
