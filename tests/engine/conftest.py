"""Models and curves of the tests in this folder."""

from __future__ import annotations

import pytest

from benchmarks import vllm_engine as engine
from kvsketch.evaluation.runner.loading import resolve_model


@pytest.fixture(scope="session")
def curves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Curves of the packaged model, measured on other prompts than the tests'."""
    return engine.curves(tmp_path_factory.mktemp("curves"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model with sliding windows in four of its six layers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=2100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        query_pre_attn_scalar=32,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hybrid")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("longeval-one-head")).save_pretrained(folder)
    return str(folder)
