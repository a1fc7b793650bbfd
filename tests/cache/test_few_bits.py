"""What the default does with slots in few bits, beside which a mass is large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
from kvsketch import SketchCache
from kvsketch.methods.heavy_merge import HeavyMerge
from kvsketch.page.part import Part


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def ids_of(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(seed))


def letters(text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
    """In the place of a tokenizer."""
    return {"input_ids": [ord(letter) % 90 for letter in text]}


@torch.no_grad()
def read(model: Any, cache: SketchCache, tokens: int, piece: int) -> None:
    for start in range(0, tokens, piece):
        ids = ids_of(piece, cache.get_seq_length() + start)
        model(ids, past_key_values=cache, use_cache=True)


def parts(cache: SketchCache) -> list[Part]:
    """Those in few bits, or else all."""
    found = [layer.stream.page for layer in cache._sketches()]
    return [page.exact if page.middle is None else page.middle for page in found]


def merged(cache: SketchCache) -> bool:
    """Whether some slot stands for several tokens."""
    found = [bool((layer.stream.slots.masses() > 1.5).any()) for layer in cache._sketches()]
    assert len(set(found)) == 1
    return found[0]


def spent(cache: SketchCache) -> float:
    """Bytes per KV head, in tokens of the model's dtype."""
    layers = [layer.stream for layer in cache._sketches()]
    one = cache.exact_nbytes() / cache.get_seq_length()
    return sum(t.nbytes for stream in layers for t in stream.page.tensors()) / one


@pytest.mark.parametrize("allocation", ["even", "global"])
@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_are_kept_and_no_masses_stored(llama: Any, bits: int, allocation: str) -> None:
    cache = SketchCache(llama.config, budget=80, bits=bits, allocation=allocation)
    read(llama, cache, 600, 600)
    assert cache._sketches()[0].stream.scores.asked_again
    for decoded in (0, 1, 60, 60):
        read(llama, cache, decoded, 1)
        assert not merged(cache)
        assert not any("log_mass" in part.fields for part in parts(cache))
        assert spent(cache) <= 80 * 1.025 + 1
    places = cache._sketches()[0].stream.slots.positions
    assert places is None or torch.equal(places, places.round())


def test_other_slots_are_merged(llama: Any) -> None:
    """Those in the model's dtype, those of which no query asked again, and those that stream."""
    settings: list[dict[str, Any]] = [{"bits": 16}, {"bits": 4, "prefill": "streaming"}]
    for given in settings:
        cache = SketchCache(llama.config, budget=80, allocation="even", **given)
        read(llama, cache, 600, 600)
        assert merged(cache)
    cache = SketchCache(llama.config, budget=80, allocation="even", bits=4)
    read(llama, cache, 300, 1)
    assert not cache._sketches()[0].stream.scores.asked_again
    assert merged(cache)


def test_slots_that_were_merged_pay_for_their_masses(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those in files of kvsketch before this was so."""
    cache = SketchCache(llama.config, budget=80, bits=4, allocation="global")
    with monkeypatch.context() as before:
        before.setattr(HeavyMerge, "in_few_bits", lambda self: self)
        read(llama, cache, 600, 600)
    assert merged(cache)
    cache.compact(60)
    for decoded in (0, 60):
        read(llama, cache, decoded, 1)
        assert all("log_mass" in part.fields for part in parts(cache))
        assert spent(cache) <= (80 if decoded else 60) * 1.025 + 1


def test_a_share_that_is_given_counts_in_few_bits(llama: Any) -> None:
    settings = {"budget": 80, "bits": 4, "allocation": "even"}
    held = {}
    for share in (None, 0.5, 1.0):
        cache = SketchCache(llama.config, options={"share": share}, **settings)
        read(llama, cache, 600, 600)
        assert merged(cache) is (share == 0.5)
        held[share] = cache.summary()["slots"]
    assert held[None] == held[1.0] > held[0.5]


@pytest.mark.parametrize("queries", ["reread", "sample"])
def test_a_second_reading_has_asked_for_the_whole_context(
    llama: Any, tmp_path: Path, queries: str
) -> None:
    cache = SketchCache(llama.config, budget=80, bits=4, allocation="global")
    kvsketch.prefill(llama, ids_of(600), cache, queries=queries, tokenizer=letters)
    cache.save(tmp_path / "cache.kvs")
    for one in (cache, SketchCache.load(tmp_path / "cache.kvs", llama)):
        for decoded in (0, 60):
            read(llama, one, decoded, 1)
            assert not merged(one)
            assert not any("log_mass" in part.fields for part in parts(one))
