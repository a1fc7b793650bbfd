"""Second readings: the kernel they use, padding, parts that attend only to themselves, samples."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_reading import Letters, answer, ids_of
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvsketch
from families import CONFIGS, build
from kvsketch import SketchCache
from kvsketch.hf import parts, second_reading
from kvsketch.hf.forward import Forward
from kvsketch.hf.interface import watched
from kvsketch.methods import rereading
from tiny_model import small_llama

SECOND = ["reread", "local", "sample"]


@pytest.fixture(scope="module")
def llama():
    return small_llama().eval()


@pytest.fixture
def scores(monkeypatch):
    """The scores of all layers, recorded right after the last part, in the order of the
    readings."""
    found = []

    def finish(self, sample):
        found.extend(layer.stream.slots.score for layer in self.sketches)
        self.reading = None

    monkeypatch.setattr(Forward, "finish_reading", finish)
    return found


@pytest.fixture
def small(monkeypatch):
    """Sizes by which a short context has several parts."""
    monkeypatch.setattr(parts, "PART", 80)
    monkeypatch.setattr(parts, "LOCAL_PART", 60)
    monkeypatch.setattr(parts, "ROW", 40)
    monkeypatch.setattr(parts, "OF_ROW", 16)


def read(model, ids, queries, method="kvzip", **settings):
    cache = SketchCache(model.config, method, budget=0.2, allocation="global")
    kvsketch.prefill(model, ids, cache, queries=queries, tokenizer=Letters(), **settings)
    return cache


def abouts(queries, n):
    """The positions that each part repeats, computed here independently."""
    if queries == "sample":
        index = [i for start in range(0, n, 40) for i in range(start, min(start + 16, n))]
        return [torch.tensor(index[i : i + 80]) for i in range(0, len(index), 80)]
    size = {"reread": 80, "local": 60}[queries]
    return [torch.arange(i, min(i + size, n)) for i in range(0, n, size)]


def plainly(model, ids, queries):
    """Scores from queries and keys of transformers' own attention, with masks made here."""
    n, seen, plain = ids.shape[1], {}, DynamicCache()
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads

    def around(kernel, module, query, key, value, *args, **kwargs):
        seen[module.layer_idx] = query, key
        return kernel(module, query, key, value, *args, **kwargs)

    with torch.no_grad():
        model(ids, past_key_values=plain)
    scores = torch.zeros(layers, heads, n)
    for index in abouts(queries, n):
        start = int(index[0])
        asked = parts.REPEAT_PART if start else parts.REPEAT
        texts = [torch.tensor([Letters()(text)["input_ids"]]) for text in (asked, "\n")]
        again = torch.cat([texts[0], ids[:, max(0, start - 8) : start], texts[1], ids[:, index]], 1)
        q = again.shape[1]
        near = torch.zeros(n + q, dtype=torch.bool)
        near[: min(4, start)] = near[n:] = near[index] = True
        later = torch.ones(q, n + q, dtype=torch.bool).triu(n + 1)
        mask = ~later if queries == "reread" else ~later & near
        with torch.no_grad(), watched(model, around):
            position = torch.arange(n, n + q)[None]
            model(
                again, past_key_values=plain, attention_mask=mask[None, None], position_ids=position
            )
        plain.crop(-q)
        for number in range(layers):
            query, key = seen[number]
            logits = query @ key.repeat_interleave(2, dim=1).mT * query.shape[-1] ** -0.5
            share = logits.masked_fill(later | ~near, -torch.inf).softmax(-1)
            largest = share.amax(2).view(heads, 2, -1).amax(1)[:, index]
            scores[number][:, index] = torch.maximum(scores[number][:, index], largest)
    return scores


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("queries", SECOND)
def test_scores_are_those_of_a_plain_computation(scores, small, queries, implementation):
    """Scores of our kernel, and of the reference that replaces it for other attention kernels, are
    those of a plain computation."""
    model = small_llama().eval()
    model.set_attn_implementation(implementation)
    ids = ids_of(1, 250)
    read(model, ids, queries)
    model.set_attn_implementation("sdpa")
    wanted = plainly(model, ids, queries)
    found = torch.cat(scores)
    if queries == "sample":
        index = torch.cat(abouts(queries, 250))
        found, wanted = found[..., index], wanted[..., index]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)  # logits are large for float32
    assert (wanted > 0).all()


@pytest.mark.parametrize("queries", SECOND)
def test_the_kernel_is_ours_where_it_can_be(llama, monkeypatch, queries):
    calls = Counter()

    def counted(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(second_reading, "attend_again")
    counted(second_reading, "causal")
    counted(rereading, "attention_received")
    ids = ids_of(2, 300)
    read(llama, ids, queries)
    assert calls == {"attend_again": 2}  # and no attention was computed besides
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    read(llama, ids, queries, attention_mask=mask)
    assert calls["attend_again"] == 2
    assert calls["causal"] == (0 if queries == "reread" else 2)


@pytest.mark.parametrize("queries", ["reread", "local"])
@pytest.mark.parametrize("method", ["kvzip", "heavy_merge", "snapkv"])
def test_padding_changes_nothing(llama, scores, queries, method):
    """A row beside a padded one has the scores that it has alone. The padded batch is read by the
    reference, the single row by our kernel."""
    ids = ids_of(2, 320)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    read(llama, ids[:, :300], queries, method, attention_mask=mask[:, :300])
    read(llama, ids[:1, :300], queries, method)
    together, alone = torch.cat(scores[:2]), torch.cat(scores[2:])
    torch.testing.assert_close(together[::2], alone, rtol=1e-3, atol=1e-4)
    assert (together[1::2, :, :25] == 0).all()  # up to 25 only: snapkv pools scores over neighbours
    assert (together[1::2, :, 30:] > 0).all()


@pytest.mark.parametrize("queries", SECOND)
def test_padding_before_a_part_is_seen_by_nobody(scores, small, queries):
    """Padding in an earlier part has no effect on the scores of later parts: sdpa and eager
    attention give the same."""
    model, ids = small_llama().eval(), ids_of(2, 250)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        read(model, ids, queries, attention_mask=mask)
    torch.testing.assert_close(scores[:2], scores[2:], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("queries", SECOND)
@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in ("gemma2", "gemma3")])
def test_nothing_is_left_behind_where_nothing_is_compressed_yet(family, queries, small):
    model = build(family)
    ids = ids_of(2, 120)
    cache = SketchCache(model.config, budget=200)
    kvsketch.prefill(model, ids[:, :100], cache, queries=queries, tokenizer=Letters())
    assert cache.get_seq_length() == 100
    assert torch.equal(answer(model, ids, cache), answer(model, ids, DynamicCache()))


@pytest.mark.parametrize("queries", SECOND)
def test_what_nobody_needs_is_not_computed(llama, queries):
    calls = Counter()
    names = {module: name for name, module in llama.named_modules()}
    hooks = [
        module.register_forward_hook(lambda module, *_: calls.update([names[module]]))
        for module in llama.modules()
    ]
    try:
        read(llama, ids_of(1, 300), queries)
    finally:
        for hook in hooks:
            hook.remove()
    assert calls["model.layers.0.mlp"] == calls["model.layers.1.self_attn.k_proj"] == 2
    assert calls["model.layers.1.self_attn.o_proj"] == calls["model.layers.1.mlp"] == 1
    assert calls["model.norm"] == 1
    assert calls["lm_head"] == 0


def test_a_forward_that_accelerate_looks_after_runs_to_its_end(scores):
    model = small_llama().eval()
    ids, calls = ids_of(1, 300), []
    read(model, ids, "reread")
    model.model.layers[0]._hf_hook = None
    hook = model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    read(model, ids, "reread")
    hook.remove()
    assert len(calls) == 2
    torch.testing.assert_close(torch.cat(scores[2:]), torch.cat(scores[:2]), rtol=1e-4, atol=1e-6)


def test_a_second_reading_is_the_same_however_the_first_went(llama, small, scores):
    for size in (None, 100, 7):
        read(llama, ids_of(1, 250), "sample", chunk_size=size)
    for later in (scores[2:4], scores[4:]):
        torch.testing.assert_close(later, scores[:2], rtol=1e-3, atol=1e-5)


def test_after_a_sample_every_token_has_a_score(llama, small, monkeypatch):
    found = []
    finish = Forward.settle

    def settle(self, layer, *args, **kwargs):
        found.append(layer.stream.slots.score)
        finish(self, layer, *args, **kwargs)

    ids = ids_of(1, 250)
    monkeypatch.setattr(Forward, "settle", settle)
    for method in ("kvzip", "heavy_merge"):
        read(llama, ids, "sample", method)
        assert all((score > 0).all() for score in found[-2:])
    cache = SketchCache(llama.config, "uniform", budget=0.2)  # a method without scores
    kvsketch.prefill(llama, ids, cache, queries="sample", tokenizer=Letters())
    assert found[-1] is None


def test_masks_that_models_make_over_the_newest_tokens_are_widened():
    boolean = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    wide = second_reading.widened(boolean, 5)
    assert wide.tolist() == [[[[True] * (3 + i) + [False] * (2 - i) for i in range(3)]]]
    added = torch.zeros(1, 1, 3, 3).masked_fill(~boolean, -1e9)
    assert torch.equal(second_reading.widened(added, 5) == 0, wide)
    assert second_reading.widened(None, 5) is None
    assert second_reading.widened(wide, 5) is wide


def test_a_sample_of_a_short_context_is_all_of_it(llama, scores):
    ids = ids_of(1, 200)
    for queries in ("sample", "local"):
        read(llama, ids, queries)
    assert torch.equal(torch.cat(scores[:2]), torch.cat(scores[2:]))


def test_in_other_than_the_usual_precision():
    config = small_llama().config
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config.to_dict())).eval().bfloat16()
    for queries in SECOND:
        cache = read(model, ids_of(1, 300), queries)
        assert cache.summary()["slots"] == pytest.approx(60, rel=0.03)
