"""Models with PEFT adapters or quantised by bitsandbytes. `make test-extras` installs both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from families import VOCABULARY, build
from kvsketch import SketchCache, UnsupportedError

WINDOW: dict[str, Any] = {"sink": 2, "recent": 6}


def ids_of(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))


def answers(model: Any) -> None:
    """Check that a lossless cache answers as generate without one, and that a compressed one stays
    within its budget."""
    settings = {"attention_mask": torch.ones(1, 40, dtype=torch.long), "max_new_tokens": 8}
    settings |= {"do_sample": False, "input_ids": ids_of(40)}
    expected = model.generate(**settings)
    for budget in (1.0, 1000):
        cache = SketchCache(model.config, "snapkv", budget=budget)
        assert torch.equal(model.generate(**settings, past_key_values=cache), expected)
    cache = SketchCache(model.config, "snapkv", budget=20, **WINDOW)
    assert model.generate(**settings, past_key_values=cache).shape == (1, 48)
    assert cache.summary()["slots"] <= 22
    assert cache.get_seq_length() >= 47


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def test_lora(peft: Any) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    answers(peft.get_peft_model(build("llama"), config).eval())


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning(peft: Any) -> None:
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    answers(peft.get_peft_model(build("llama"), config).eval())


def test_prefix_tuning_is_refused_before_the_first_token(peft: Any) -> None:
    """Prefix tuning is refused, since PEFT would replace the given cache by its own."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(build("llama"), config).eval()
    cache = SketchCache(model.config, "snapkv", budget=20, **WINDOW)
    with pytest.raises(UnsupportedError, match="prefix tuning replaces the given cache"):
        model.generate(input_ids=ids_of(40), past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantised, device_map="cpu", dtype=torch.float32
    ).eval()
    assert type(model.model.layers[0].self_attn.k_proj).__name__.startswith("Linear")
    assert "bitsandbytes" in type(model.model.layers[0].self_attn.k_proj).__module__
    answers(model)
