"""Models with PEFT adapters or quantised by bitsandbytes. `make test-extras` installs both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import kvsketch
from families import VOCABULARY, build
from kvsketch import InputError, SketchCache, UnsupportedError

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
    with pytest.raises(UnsupportedError, match="prefix tuning, which replaces the given cache"):
        model.generate(input_ids=ids_of(40), past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 0


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("tokens", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prefill_without_learned_tokens_is_refused(peft: Any, tokens: str) -> None:
    config = getattr(peft, tokens)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(build("llama"), config).eval()
    cache = SketchCache(model.config, budget=0.5)
    with pytest.raises(UnsupportedError, match="without the tokens that PEFT's prompt"):
        kvsketch.prefill(model, ids_of(40), cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj"]])
def test_a_file_is_of_the_active_adapter(peft: Any, tmp_path: Path, targets: list[str]) -> None:
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config).eval()
    model.add_adapter("other", config)
    path, plain = tmp_path / "adapted.kvs", tmp_path / "plain.kvs"
    with kvsketch.compressing(model, "snapkv", budget=20, **WINDOW) as caches:
        model.generate(input_ids=ids_of(40), max_new_tokens=2)
    caches[0].save(path)
    cache = SketchCache(model.config, "snapkv", budget=20, **WINDOW)
    base = build("llama")
    base.generate(ids_of(40), past_key_values=cache, max_new_tokens=2)
    cache.save(plain)

    def refused(path: Path) -> None:
        with pytest.raises(InputError, match="other weights"):
            SketchCache.load(path, model)

    SketchCache.load(path, model)
    refused(plain)
    with model.disable_adapter():
        refused(path)
        SketchCache.load(plain, model)
    model.set_adapter("other")
    refused(path)


def test_a_file_of_a_model_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    path = tmp_path / "one.kvs"
    models = build("llama"), accelerate.cpu_offload(build("llama"), execution_device="cpu")
    for model in models:
        cache = SketchCache(model.config, "snapkv", budget=20, **WINDOW)
        kvsketch.prefill(model, ids_of(40), cache)
        cache.save(path)
        for other in models:
            assert SketchCache.load(path, other).get_seq_length() == 40
    other = build("llama")
    other.model.layers[0].self_attn.k_proj.weight.data.mul_(2.0)
    with pytest.raises(InputError, match="other weights"):
        SketchCache.load(path, other)


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
