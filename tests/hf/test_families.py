"""SketchCache with every model family, through generate."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, OPTConfig

from families import CONFIGS, EVERY_METHOD, VOCABULARY, build, crossed, runs
from kvsketch import METHODS, SKETCHES, InputError, SketchCache
from kvsketch.methods.registry import PROJECTING, ROTATING

TOKENS = 40
NEW = 8
BATCHES = {"one": [0], "equal": [0, 0], "padded": [9, 0, 3]}


def prompt(padding: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, row i left-padded by ``padding[i]``."""
    generator = torch.Generator().manual_seed(len(padding))
    ids = torch.randint(3, VOCABULARY, (len(padding), TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row, width in enumerate(padding):
        ids[row, :width] = 0
        mask[row, :width] = 0
    return ids, mask


def generate(model, cache, padding, **kwargs):
    ids, mask = prompt(padding)
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        **kwargs,
    )


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama", "gemma2") else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_budget_above_tokens_equals_dynamic_cache(family):
    """With a budget above the tokens the ids are exactly DynamicCache's in float32, for every
    prefill mode, chunking and batch shape, and for every method."""
    model = build(family)
    batches = list(itertools.product(BATCHES.values(), ({}, {"prefill_chunk_size": 16})))
    settings = list(itertools.product(("exact", "streaming"), (1.0, 1000)))
    every = list(itertools.product(batches, settings))
    # Nothing is compressed, so that the method hardly matters: the default crosses everything, and
    # every other method meets two of the ways.
    ways = [("heavy_merge", way) for way in every]
    methods = [name for name in EVERY_METHOD if runs(family, name)]
    for number, method in enumerate(methods):
        ways += [(method, every[(7 * number + step) % len(every)]) for step in (0, 12)]
    expected = {}
    for method, ((padding, extra), (prefill, budget)) in ways:
        key = (*padding, *extra)
        if key not in expected:
            exact = DynamicCache(config=model.config)
            expected[key] = generate(model, exact, padding, **extra)
        cache = SketchCache(model.config, method, budget=budget, prefill=prefill)
        actual = generate(model, cache, padding, **extra)
        assert torch.equal(actual, expected[key]), (padding, extra, method, prefill)
        assert cache.get_seq_length() == TOKENS + NEW - 1


@pytest.mark.parametrize(("family", "method"), crossed(CONFIGS, [*METHODS, *PROJECTING, *ROTATING]))
def test_compressed_generation_stays_in_budget(family, method):
    """Compressed runs finish, count the true length and stay within the budget, with and without
    padding."""
    model = build(family)
    for padding in (BATCHES["one"], BATCHES["padded"]):
        window = {"sink": 2, "recent": 6}
        cache = SketchCache(model.config, method, budget=0.5, allocation="even", bits=16, **window)
        ids = generate(model, cache, padding)
        assert ids.shape == (len(padding), TOKENS + NEW)
        assert cache.get_seq_length() == TOKENS + NEW - 1
        assert cache.summary()["slots"] <= 0.5 * (TOKENS + NEW) + 2
        for layer in cache.summary()["layers"]:
            if layer["compressed"] and method != "pyramidkv":  # its layers have different budgets
                assert layer["slots"] <= 0.5 * (TOKENS + NEW) + 2
        assert any(layer["compressed"] for layer in cache.summary()["layers"])


@pytest.mark.parametrize(
    ("family", "method"), crossed(CONFIGS, [name for name in EVERY_METHOD if name in SKETCHES])
)
def test_sketches_generate(family, method):
    """With a streaming sketch generate finishes, the cache counts the true length, and the masses
    of its slots add up to the number of tokens."""
    model = build(family)
    for padding in (BATCHES["one"], BATCHES["padded"]):
        cache = SketchCache(model.config, method, budget=24, sink=2, recent=6)
        ids = generate(model, cache, padding)
        assert ids.shape == (len(padding), TOKENS + NEW)
        assert cache.get_seq_length() == TOKENS + NEW - 1
        for layer in cache.layers:
            if getattr(layer, "stream", None) is None:
                continue
            assert layer.stream.compressed
            live = torch.tensor([float(TOKENS + NEW - 1 - width) for width in padding])
            mass = layer.stream.slots.masses().sum(-1)
            torch.testing.assert_close(mass, live.unsqueeze(1).expand_as(mass))


@pytest.mark.parametrize(
    ("family", "method"), crossed(CONFIGS, ["streaming_llm", "h2o", "kcenter"])
)
def test_padding_never_enters_a_sketch(family, method):
    """A left-padded row gets the same answer as alone (methods without randomness)."""
    model = build(family)
    settings = {"budget": 24, "sink": 2, "recent": 6}
    padded = generate(model, SketchCache(model.config, method, **settings), [9, 0])
    ids, _ = prompt([9, 0])
    alone = model.generate(
        ids[:1, 9:],
        past_key_values=SketchCache(model.config, method, **settings),
        attention_mask=torch.ones_like(ids[:1, 9:]),
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert torch.equal(padded[0, TOKENS:], alone[0, TOKENS - 9 :])


def test_one_dimensional_generates_where_heads_are_scalars():
    """The method of Appendix E generates with a model of head_dim 1 and is refused for any
    other."""
    torch.manual_seed(0)
    config = OPTConfig(**{**CONFIGS["opt"]().to_dict(), "hidden_size": 4, "word_embed_proj_dim": 4})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    settings = {"sink": 2, "recent": 6}
    expected = generate(model, DynamicCache(config=config), BATCHES["padded"])
    roomy = SketchCache(model.config, "one_dimensional", budget=1000, **settings)
    assert torch.equal(generate(model, roomy, BATCHES["padded"]), expected)
    tight = SketchCache(model.config, "one_dimensional", budget=24, **settings)
    assert generate(model, tight, BATCHES["padded"]).shape == expected.shape
    assert tight.summary()["slots"] < 30
    wide = build("llama")
    with pytest.raises(InputError, match="head_dim"):
        generate(wide, SketchCache(wide.config, "one_dimensional", budget=24, **settings), [0])
