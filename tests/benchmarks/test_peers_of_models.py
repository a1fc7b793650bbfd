"""Methods that need a whole model keep the tokens that kvpress's own code keeps of a LongEval
record. Skipped where the peers are not installed (``make peers``)."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from benchmarks.peers import kvpress
from benchmarks.peers.kvpress_model import ModelJob, kept_and_scores, kept_of_model
from kvsketch import SketchCache
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.methods.registry import REREADING

#: tokens, and tokens kept on average; a part of a second reading has 2,048 tokens
SHAPES = [(300, 150), (1000, 100), (2049, 300), (2600, 650)]


@lru_cache(maxsize=1)
def packaged():
    folder = resolve_model("longeval-one-head")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = generate_cases(300, 1, seed=5)[0]["prompt"]
    return folder, model, tokenizer, tokenizer(prompt, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def theirs():
    reason = kvpress.available()
    if reason is not None:
        pytest.skip(f"kvpress: {reason}")
    folder, *_, ids = packaged()
    snapkv = {"window_size": 32, "kernel_size": 5}
    jobs = {}
    for n, kept in SHAPES:
        jobs["kvzip", n] = ModelJob("KVzipPress", ids[:, :n], kept)
        plus = {"kvzip_plus_normalization": True}
        jobs["kvzip_plus", n] = ModelJob("KVzipPress", ids[:, :n], kept, plus)
        jobs["kvgrad", n] = ModelJob("KVgradPress", ids[:, :n], kept)
        jobs["critical", n] = ModelJob(
            "CriticalAdaKVPress", ids[:, :n], kept, {}, "SnapKVPress", snapkv
        )
        jobs["layer", n] = ModelJob("AdaKVPress", ids[:, :n], kept, {}, "SnapKVPress", snapkv)
    return dict(zip(jobs, kept_of_model(folder, list(jobs.values())), strict=True))


def kept_by(cache, n):
    """Which tokens a cache keeps, bool ``[layers, heads, n]``."""
    found = torch.zeros(len(cache.layers), 2, n, dtype=torch.bool)
    for number, layer in enumerate(cache.layers):
        slots = layer.stream.slots
        assert slots.masses().max() == 1
        live = slots.masses()[0] > 0
        for head in range(2):
            found[number, head, slots.positions[0, head][live[head]].long()] = True
    return found


@pytest.mark.parametrize(("n", "kept"), SHAPES)
@pytest.mark.parametrize("method", REREADING)
def test_a_second_reading_keeps_what_kvpress_keeps(theirs, method, n, kept):
    _, model, tokenizer, ids = packaged()
    cache = SketchCache(model.config, method, budget=kept, recent=0, keep=["positions"])
    kvsketch.prefill(model, ids[:, :n], cache, queries="reread", tokenizer=tokenizer)
    assert torch.equal(kept_by(cache, n), theirs[method, n])
    others = [theirs[name, n] for name in REREADING if name != method]
    assert not any(torch.equal(theirs[method, n], other) for other in others)


def by_layer(method, n, kept):
    """Which tokens a method keeps with a window of 32, if the heads of a layer share the budget."""
    _, model, _, ids = packaged()
    cache = SketchCache(
        model.config,
        method,
        budget=kept,
        sink=0,
        recent=32,
        allocation="layer",
        keep=["positions"],
        options={"window": 32, "kernel_size": 5},
    )
    kvsketch.prefill(model, ids[:, :n], cache)
    return kept_by(cache, n)


@pytest.mark.parametrize(("n", "kept"), SHAPES)
def test_snapkv_by_layer_keeps_what_adakv_keeps(theirs, n, kept):
    assert torch.equal(by_layer("snapkv", n, kept), theirs["layer", n])


@pytest.mark.parametrize(("n", "kept"), SHAPES)
def test_criticalkv_by_layer_keeps_what_criticaladakv_keeps(theirs, n, kept):
    found = by_layer("criticalkv", n, kept)
    assert torch.equal(found, theirs["critical", n])
    assert not torch.equal(found, by_layer("snapkv", n, kept))


#: as many texts as kvpress requires
TEXTS = [case["prompt"] for case in generate_cases(70, 5, seed=9)] * 10


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_heads_are_scored_and_split_as_by_duo_attention(share):
    """Scores and kept tokens are those of DuoAttention, with the sinks and the recent window of
    kvpress."""
    reason = kvpress.available()
    if reason is not None:
        pytest.skip(f"kvpress: {reason}")
    folder, model, tokenizer, ids = packaged()
    arguments = {"head_compression_ratio": 1 - share, "on_the_fly_scoring": True}
    jobs = [ModelJob("DuoAttentionPress", ids[:, :n], 1, arguments) for n, _ in SHAPES]
    theirs, scores = kept_and_scores(folder, jobs, TEXTS)
    heads = kvsketch.measure_heads(model, tokenizer, TEXTS[:5])
    torch.testing.assert_close(heads.scores, scores, rtol=1e-4, atol=1e-5)
    for (n, _), expected in zip(SHAPES, theirs, strict=True):
        cache = SketchCache(
            model.config, allocation=heads, budget=share, sink=128, recent=256, keep=["positions"]
        )
        kvsketch.prefill(model, ids[:, :n], cache)
        assert torch.equal(kept_by(cache, n), expected)
    assert 0 < expected.float().mean() < 1
