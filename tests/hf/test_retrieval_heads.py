"""DuoAttention: retrieval heads keep every token, streaming heads sinks and the recent window.

tests/benchmarks/test_peers_of_models.py compares scores and kept tokens with kvpress."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import DynamicCache

import kvsketch
from families import CONFIGS, build
from kvsketch import InputError, RetrievalHeads, SketchCache, UnsupportedError
from kvsketch.hf import head_scores
from tiny_model import small_llama
from tiny_models import with_buffer

SINK, RECENT = 2, 12


class Letters:
    """A tokenizer for models that have none: every character is a token."""

    def __call__(self, text, return_tensors="pt"):
        return {"input_ids": torch.tensor([[3 + ord(c) % 90 for c in text]])}


@pytest.fixture(scope="module")
def llama():
    return small_llama().eval()


def layers_and_heads(model):
    return model.config.num_hidden_layers, model.config.num_key_value_heads


def some_heads(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    return RetrievalHeads(torch.rand(layers_and_heads(model), generator=g))


def ids_of(rows, tokens, seed=0):
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def tokens_of(layer, row, head):
    slots = layer.stream.slots
    live = slots.masses()[row, head] > 0
    return slots.positions[row, head][live].long().tolist()


@pytest.mark.parametrize("prefill", ["exact", "streaming"])
@pytest.mark.parametrize("method", ["streaming_llm", "heavy_merge"])
def test_prompt_and_decoded_tokens_stay_where_they_should(llama, method, prefill):
    """With every method, through many compressions in 60 decoded tokens, retrieval heads keep all
    tokens, and streaming heads sinks and the most recent tokens."""
    heads = some_heads(llama)
    settings = {"allocation": heads, "budget": 0.5, "sink": SINK, "recent": RECENT}
    settings |= {"prefill": prefill, "keep": ["positions"]}
    cache = with_buffer(SketchCache(llama.config, method, **settings), 3)
    ids, padding = ids_of(2, 100), 7
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[1, :padding] = 0
    streaming = heads.streaming(0.5)
    for start in (0, *range(100, 160)):
        step = ids_of(2, 1, start) if start else ids
        end = start + step.shape[1]
        with torch.no_grad():
            llama(step, past_key_values=cache, attention_mask=mask[:, :end])
        for number, layer in enumerate(cache.layers):
            for head in range(streaming.shape[1]):
                for row, first in ((0, 0), (1, padding)):
                    kept = tokens_of(layer, row, head)
                    assert kept[:SINK] == list(range(first, first + SINK))
                    if streaming[number, head]:
                        assert kept[SINK:] == list(range(end - len(kept) + SINK, end))
                        assert SINK + RECENT <= len(kept) <= SINK + RECENT + 4 * 3
                        assert start or len(kept) == SINK + RECENT
                    else:
                        assert kept == list(range(first, end))
    assert 0 < streaming.sum() < streaming.numel()


def test_all_heads_of_a_layer_may_be_of_one_kind(llama):
    layers, heads = layers_and_heads(llama)
    first = torch.zeros(layers, heads)
    first[0] = 1.0
    cache = SketchCache(
        llama.config, allocation=RetrievalHeads(first), budget=1 / layers, sink=SINK, recent=RECENT
    )
    with torch.no_grad():
        llama(ids_of(1, 90), past_key_values=cache)
    held = [layer.stream.held.tolist() for layer in cache.layers]
    assert held == [[[90] * heads], *[[[SINK + RECENT] * heads]] * (layers - 1)]
    assert cache.summary()["layers"][0]["exact_heads"] == list(range(heads))


def test_with_retrieval_heads_alone_answers_are_exact(llama):
    ids = ids_of(2, 60)
    cache = SketchCache(llama.config, allocation=some_heads(llama), budget=1.0)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = llama.generate(ids, past_key_values=DynamicCache(), **settings)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **settings), plain)


def test_few_bits_and_a_prompt_that_fits_the_window(llama):
    settings = {"allocation": some_heads(llama), "budget": 0.5, "sink": SINK, "recent": RECENT}
    quantised, short = (SketchCache(llama.config, bits=b, **settings) for b in (8, 16))
    with torch.no_grad():
        llama(ids_of(1, 400), past_key_values=quantised)
        llama(ids_of(1, SINK + RECENT), past_key_values=short)
    assert quantised.nbytes() < 0.4 * quantised.exact_nbytes()
    assert quantised.summary()["slots"] == (400 + SINK + RECENT) / 2
    assert not short.layers[0].stream.compressed


def test_the_lowest_scores_stream():
    heads = RetrievalHeads(torch.tensor([[0.5, 0.1, 0.9], [0.2, 0.8, 0.7]]))
    assert heads.streaming(0.5).tolist() == [[True, True, False], [True, False, False]]
    assert heads.streaming(0.75).sum() == round(6 * 0.25)
    assert not heads.streaming(1.0).any()


def test_a_score_is_the_area_under_the_cumulated_attention(llama):
    module = llama.model.layers[0].self_attn
    group, n, dim = module.num_key_value_groups, 5, module.head_dim
    heads = layers_and_heads(llama)[1]
    cos, sin = torch.ones(1, 9, dim), torch.zeros(1, 9, dim)
    k = torch.randn(1, heads, n, dim, generator=torch.Generator().manual_seed(1))

    def turned(q, k, cos, sin):
        """Keys so large at one position that all attention is there: at 0, or at the last token."""
        place = torch.zeros(heads, k.shape[2])
        place[0, 0], place[1:, -1] = 1e4, 1e4
        return torch.ones_like(q), place[None, :, :, None].expand_as(k)

    q = torch.zeros(1, heads * group, n, dim)
    score = head_scores._score(module, turned, q, k, (cos, sin), 9)
    torch.testing.assert_close(score, torch.tensor([1.0] + [1 / 9] * (heads - 1)))
    flat = head_scores._score(module, lambda q, k, *_: (q, k), q, k, (cos, sin), 9)
    torch.testing.assert_close(flat, torch.full((heads,), 10 / 18))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_heads_are_measured_or_the_model_is_refused_by_name(family):
    model = build(family)
    name = "apply_rotary_pos_emb"
    file = sys.modules[type(model).__module__]
    before = getattr(file, name, None)
    text = "what a model reads while its heads are measured, whatever it is"
    texts = [text, text[::-1]]
    if family in ("opt", "mpt"):
        with pytest.raises(UnsupportedError, match=type(model).__name__):
            kvsketch.measure_heads(model, Letters(), texts, positions=40)
    else:
        heads = kvsketch.measure_heads(model, Letters(), texts, positions=40)
        cache = SketchCache(model.config, allocation=heads, budget=0.5, sink=SINK, recent=RECENT)
        with torch.no_grad():
            model(ids_of(1, 60), past_key_values=cache)
        assert bool(((heads.scores > 0) & (heads.scores < 1)).all())
        assert heads.scores.std() > 0
    assert getattr(file, name, None) is before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_model_is_as_it_was_after_an_error(llama):
    file = sys.modules[type(llama).__module__]
    before = file.apply_rotary_pos_emb

    def fails(*_):
        raise RuntimeError("in the middle")

    hook = llama.model.layers[-1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        kvsketch.measure_heads(llama, Letters(), ["a" * 50], positions=40)
    hook.remove()
    assert file.apply_rotary_pos_emb is before
    assert not any(m._forward_pre_hooks for m in llama.modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 64}, "budget=64 is the fraction of retrieval heads"),
        ({"tolerance": 0.1}, "tolerance=0.1"),
        ({"bits": "measured"}, "bits='measured'"),
        ({"sink": 0, "recent": 0}, "sink \\+ recent must be at least 1"),
        ({"method": "subgen"}, "method='subgen'"),
    ],
)
def test_what_excludes_it_is_named(llama, settings, message):
    with pytest.raises(InputError, match=message):
        SketchCache(llama.config, allocation=some_heads(llama), **settings)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.ones(3), r"scores \(3,\)"),
        (torch.full((2, 2), torch.nan), "must be finite"),
        (torch.ones(9, 2), "9 layers x 2 KV heads"),
    ],
)
def test_scores_that_do_not_fit_are_named(llama, scores, message):
    with pytest.raises(InputError, match=message):
        SketchCache(llama.config, allocation=RetrievalHeads(scores))


@pytest.mark.parametrize(
    ("texts", "positions", "message"),
    [
        ([], 40, "at least one"),
        ("one text", 4, "list of strings"),
        (["a" * 50, "b" * 30], 40, r"texts\[1\] has 30 tokens"),
        (["a" * 50], 1, "positions=1"),
    ],
)
def test_texts_that_do_not_do_are_named(llama, texts, positions, message):
    with pytest.raises(InputError, match=message):
        kvsketch.measure_heads(llama, Letters(), texts, positions=positions)
