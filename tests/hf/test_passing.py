"""A model takes its cache as ``cache`` since transformers 5.24, and as ``past_key_values`` before.
Neither name is passed by where the other belongs, and nothing of ours uses a deprecated one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache

import kvsketch
from families import VOCABULARY, build
from kvsketch import InputError, SketchCache
from kvsketch.hf import models
from kvsketch.hf.passing import given, passed, passed_to_generate

#: the names that ``generate`` and models of this transformers take
NAMES = ("past_key_values", "cache")[: 1 + (Version(transformers.__version__) >= Version("5.24"))]
IDS = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))


class FromTheHub(nn.Module):
    """Code that knows the older name alone."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        return past_key_values


class Wrapped(nn.Module):
    """As PEFT wraps a model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return given(kwargs)


def test_a_forward_gets_its_cache() -> None:
    cache = object()
    assert FromTheHub()(IDS, **passed(FromTheHub(), cache)) is cache
    assert Wrapped()(IDS, **passed(Wrapped(), cache)) is cache
    assert given({"cache": None, "past_key_values": cache}) is cache
    assert given({"cache": cache}) is cache
    assert given({"use_cache": True}) is None
    model = build("llama")
    assert list(passed(model, cache)) == list(passed_to_generate(cache)) == [NAMES[-1]]


def test_nothing_uses_a_deprecated_name() -> None:
    model = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache = SketchCache(model.config, budget=0.5)
        kvsketch.prefill(model, IDS, cache, queries="prompt")
        with kvsketch.compressing(model, budget=0.5) as caches:
            model.generate(IDS, max_new_tokens=3, do_sample=False)
            model(IDS)
    assert [cache.get_seq_length() for cache in caches] == [42, 40]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_generate_refuses_to_read_again(name: str) -> None:
    model = build("llama")
    with pytest.raises(InputError, match="use_cache=False with a SketchCache"):
        model.generate(
            IDS, max_new_tokens=2, use_cache=False, **{name: SketchCache(model.config, budget=0.5)}
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_cache_of_the_callers_is_used(name: str) -> None:
    """Inside ``compressing`` a call with a cache, under either name, gets no other one."""
    model = build("llama")
    mine = DynamicCache(config=model.config)
    with kvsketch.compressing(model, budget=0.5) as caches:
        model.generate(IDS, max_new_tokens=3, do_sample=False, **{name: mine})
        assert mine.get_seq_length() == 42
        model(IDS[:, :5], **{name: mine})
    assert not caches
    assert mine.get_seq_length() == 47


@pytest.mark.parametrize("family", ["mpt", "phi3"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_find_the_cache(family: str, name: str) -> None:
    """Families whose code of our own looks for the cache among a call's arguments."""
    model = build(family)
    small = {"budget": 20, "sink": 2, "recent": 6, "bits": 16, "allocation": "even"}
    exact, mine = DynamicCache(config=model.config), SketchCache(model.config, **small)
    for cache in (exact, mine):
        ids = model.generate(IDS, max_new_tokens=4, do_sample=False, **{name: cache})
        assert ids.shape[1] == 44
    assert mine.summary()["slots"] <= 22


def test_a_newer_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("llama").config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SketchCache(config, budget=0.5)
        for older in ("5.16.1", "5.24.0", "5.24.1.dev0"):
            monkeypatch.setattr(models, "__version__", older)
            SketchCache(config, budget=0.5)
    for newer in ("5.25.0", "6.0.0.dev0"):
        monkeypatch.setattr(models, "__version__", newer)
        with pytest.warns(UserWarning, match=f"transformers {newer} is newer than 5.24"):
            SketchCache(config, budget=0.5)
