"""Mistakes of the first hour are refused in words that say what to do, and a cache shows itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
from families import VOCABULARY, build
from kvsketch import METHODS, InputError, SketchCache
from kvsketch.documents.answering import Sampling
from tiny_model import tiny_tokenizer


def ids_of(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


def generate(model: Any, ids: torch.Tensor, cache: SketchCache) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False
    )


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def test_a_cache_shows_its_method_budget_and_size(llama: Any) -> None:
    cache = SketchCache(llama.config, "snapkv", budget=64)
    assert repr(cache) == "SketchCache(snapkv, budget=64, empty)"
    assert cache.summary()["kv_fraction"] is None
    generate(llama, ids_of(130), cache)
    said = cache.summary()
    assert repr(cache) == (
        f"SketchCache(snapkv, budget=64, 133 tokens seen, {said['slots']:.0f} slots per KV head, "
        f"{said['kv_bytes']:,} of {said['exact_kv_bytes']:,} bytes)"
    )
    assert said["kv_fraction"] == said["kv_bytes"] / said["exact_kv_bytes"] < 1
    assert repr(SketchCache(llama.config, tolerance=0.1)) == (
        "SketchCache(heavy_merge, tolerance=0.1, empty)"
    )
    cache.reset()
    assert repr(cache).endswith("empty)")


def test_the_repr_of_half_a_cache_raises_nothing(llama: Any) -> None:
    assert "SketchCache object" in repr(SketchCache.__new__(SketchCache))
    cache = SketchCache(llama.config)
    cache.layers[0].stream = None
    assert "SketchCache" in repr(cache)


def test_dir_lists_what_is_exported() -> None:
    assert set(kvsketch.__all__) <= set(dir(kvsketch))


def test_the_api_page_shows_the_methods_of_a_cache() -> None:
    """Also those that save, load and copy it: all else is called internal there."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    members = page.split("SketchCache\n")[1].split("members: [")[1].split("]")[0].split(", ")
    assert {"summary", "error", "save", "load", "fork", "reset", "crop", "nbytes"} <= set(members)
    assert all(getattr(SketchCache, name).__doc__ for name in members)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers=2; this model has 1"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2; this model has 3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=2; this model has 4"),
        ({"hidden_size": 32}, "hidden_size=64; this model has 32"),
    ],
)
def test_a_cache_of_another_models_configuration_is_refused(
    change: dict[str, int], says: str
) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**(sizes | change))).eval()
    cache = SketchCache(LlamaConfig(**sizes), budget=64)
    for read in (generate, lambda model, ids, cache: kvsketch.prefill(model, ids, cache)):
        with pytest.raises(InputError, match=f"another model, with {says}: make the cache with"):
            read(model, ids_of(130), cache)
        assert not cache.get_seq_length()
    cache = SketchCache(LlamaConfig(**(sizes | change)), budget=64)
    generate(model, ids_of(130), cache)  # an equal configuration is another object


@pytest.mark.parametrize("tokens", [20, 50, 66, 100, 130, 133])
@pytest.mark.parametrize("budget", [64, 1.0])
def test_a_text_that_does_not_continue_the_cache_is_refused(
    llama: Any, tokens: int, budget: float
) -> None:
    """transformers passes on the end of a text that is as long as the cache or shorter; it would be
    read as if it followed. The cache is unchanged then."""
    cache, first = SketchCache(llama.config, budget=budget), ids_of(130)
    out = generate(llama, first, cache)
    expected = generate(llama, torch.cat([out, ids_of(5, 2)], 1), cache.fork())
    with pytest.raises(InputError, match=r"is not longer than the 133 tokens .* call reset"):
        generate(llama, ids_of(tokens, 1), cache)
    again = generate(llama, torch.cat([out, ids_of(5, 2)], 1), cache)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "mpt"])
def test_generate_without_use_cache_is_refused(family: str) -> None:
    """It would pass all of the text again at every step."""
    model = build(family)
    cache, ids = SketchCache(model.config, budget=1.0), ids_of(60)
    settings = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(InputError, match=r"^use_cache=False with a SketchCache: .* use_cache=True"):
        model.generate(ids, use_cache=False, **settings)
    assert cache.get_seq_length() == 0
    model.generation_config.use_cache = False
    try:
        with pytest.raises(InputError, match="use_cache=False with a SketchCache"):
            model.generate(ids, **settings)
        out = model.generate(ids, use_cache=True, **settings)
    finally:
        model.generation_config.use_cache = True
    assert cache.get_seq_length() == 63
    exact = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(out, exact)


def test_an_empty_text_is_said_to_be_empty(llama: Any) -> None:
    with pytest.raises(InputError, match="the text is empty"):
        generate(llama, ids_of(0), SketchCache(llama.config))


def test_a_padded_batch_still_continues(llama: Any) -> None:
    """Positions of a padded row lag behind the number of tokens, which is no mistake."""
    ids, mask = ids_of(260).view(2, 130), torch.ones(2, 130, dtype=torch.int64)
    mask[0, :100] = 0
    mask[1, :90] = 0
    cache = SketchCache(llama.config, budget=64)
    for more in (5, 3):
        out = llama.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False
        )
        ids = torch.cat([out, ids_of(2 * more, more).view(2, more)], 1)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)


@pytest.mark.parametrize("wrong", ["a BatchEncoding", None, "text", [1, 2]], ids=str)
def test_what_is_no_tensor_of_ids_is_refused(llama: Any, wrong: Any) -> None:
    if wrong == "a BatchEncoding":
        wrong = tiny_tokenizer()("brave calm", return_tensors="pt")
    with pytest.raises(InputError, match=f"must be an int64 tensor .* {type(wrong).__name__}; of"):
        kvsketch.prefill(llama, wrong, SketchCache(llama.config))


def test_what_is_no_model_or_mask_is_refused(llama: Any) -> None:
    wrong: Any = None
    with pytest.raises(InputError, match="model must be a transformers model, got NoneType"):
        kvsketch.prefill(wrong, ids_of(9), SketchCache(llama.config))
    mask: Any = [1] * 9
    with pytest.raises(InputError, match="attention_mask must be a tensor, got list"):
        kvsketch.prefill(llama, ids_of(9), SketchCache(llama.config), attention_mask=mask)


@pytest.mark.parametrize("seed", ["x", None, 1.5, True], ids=repr)
def test_a_seed_is_an_int(llama: Any, seed: Any) -> None:
    with pytest.raises(InputError, match=f"seed={seed!r} must be an int"):
        SketchCache(llama.config, seed=seed)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1], ids=repr)
def test_a_seed_has_64_bits(llama: Any, seed: int) -> None:
    makers = (
        lambda: SketchCache(llama.config, seed=seed),
        lambda: METHODS["uniform"](seed=seed),
        lambda: Sampling(seed=seed),
    )
    for make in makers:
        with pytest.raises(InputError, match=f"seed={seed} must fit into 64 bits"):
            make()


@pytest.mark.parametrize("options", [[1], "window"], ids=repr)
def test_options_are_named(llama: Any, options: Any) -> None:
    with pytest.raises(InputError, match="must be a dict of the method's own arguments"):
        SketchCache(llama.config, options=options)


def test_the_exact_cache_is_transformers_own(llama: Any) -> None:
    with pytest.raises(InputError, match=r"transformers' DynamicCache, or budget=1\.0"):
        SketchCache(llama.config, "exact")
