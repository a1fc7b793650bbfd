"""A prompt that is read exactly in chunks, without its length being given, causes a warning."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from kvsketch import SketchCache
from tiny_model import tiny_model
from tiny_models import with_buffer

SETTINGS = {"budget": 20, "sink": 2, "recent": 6}


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=64)


def ids(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).remainder(60).unsqueeze(0) + 1


def answer(model, text: int | torch.Tensor, cache: SketchCache, new: int = 2, **options):
    text = ids(text) if isinstance(text, int) else text
    return model.generate(
        text,
        attention_mask=torch.ones_like(text),
        past_key_values=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **options,
    )


@pytest.mark.parametrize(("tokens", "budget"), [(48, 20), (56, 40), (40, 20)])
def test_chunks_without_the_length_are_told_of_once(model, tokens, budget):
    cache = SketchCache(model.config, **{**SETTINGS, "budget": budget})
    with pytest.warns(UserWarning, match="chunks of 16 tokens .* prefill=") as said:
        answer(model, tokens, cache, prefill_chunk_size=16)
    assert len([w for w in said if "prefill=" in str(w.message)]) == 1


@pytest.mark.parametrize(
    "settings", [{"prefill": 48}, {"prefill": "streaming"}, {"budget": 1000}, {"budget": 1.0}]
)
def test_what_is_meant_is_not_told_of(model, settings):
    cache = SketchCache(model.config, **{**SETTINGS, **settings})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "SketchCache.prefill")
        answer(model, 48, cache, prefill_chunk_size=16)


def test_a_chat_is_no_prompt_in_chunks(model):
    cache = SketchCache(model.config, **SETTINGS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "SketchCache.prefill")
        said = answer(model, 40, cache, new=3)
        answer(model, torch.cat([said, ids(39)], 1), cache, new=3)  # a turn of 40 unread tokens
        cache.reset()
        for tokens in (30, 12):  # a context, and the question after it
            model(ids(tokens), past_key_values=cache)


def test_numbers_of_numpy_are_numbers(model):
    """Budgets and windows may be numbers of NumPy; the cache behaves as with Python's."""
    for given, plain in ((np.int64(24), 24), (np.float32(0.5), 0.5), (np.float64(0.5), 0.5)):
        cache = SketchCache(
            model.config, "snapkv", budget=given, sink=np.int64(2), recent=np.int32(6)
        )
        same = SketchCache(model.config, "snapkv", budget=plain, sink=2, recent=6)
        assert torch.equal(answer(model, 60, cache, new=4), answer(model, 60, same, new=4))
        assert cache.summary() == same.summary()
        assert type(cache.summary()["budget"]) is type(plain)


@pytest.mark.parametrize(("chunk", "held"), [(3, 23), (4, 20), (9, 20)])
def test_a_later_chunk_is_compressed_if_it_fills_the_buffer(model, chunk, held):
    """After the first compression, a chunk that does not fill the buffer of 4 slots is kept as it
    is, as decoded tokens are; a longer one is compressed to the budget."""
    cache = with_buffer(SketchCache(model.config, **SETTINGS, method="snapkv"), 4)
    with torch.no_grad():
        model(ids(48), past_key_values=cache)
        model(ids(chunk), past_key_values=cache)
        assert [layer["slots"] for layer in cache.summary()["layers"]] == [held, held]
        model(ids(1), past_key_values=cache)
    # The buffer of 4 slots is full: compressed to three buffers below the budget.
    after = 20 - 3 * 4 if chunk == 3 else held + 1
    assert [layer["slots"] for layer in cache.summary()["layers"]] == [after, after]


def test_a_prompt_shorter_than_announced_is_told_of_once(model):
    with pytest.warns(UserWarning, match="waits for a prompt of 100 tokens.* are 41:") as said:
        answer(model, 40, SketchCache(model.config, "snapkv", **SETTINGS, prefill=100), new=9)
    assert len([w for w in said if "waits for" in str(w.message)]) == 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in (40, 41):  # the last token may be a chunk of its own
            answer(model, 40, SketchCache(model.config, "snapkv", **SETTINGS, prefill=length))
    assert not [w for w in said if "waits for" in str(w.message)]
