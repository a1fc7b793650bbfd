"""CriticalKV equals its rule, computed for one head and one token at a time; where W_O comes
from."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config

from families import VOCABULARY, build
from kvsketch import InputError, Observed, SketchCache, Slots, UnsupportedError
from kvsketch.hf.output import output_weight
from kvsketch.methods import make
from kvsketch.methods.criticalkv import CriticalKV
from kvsketch.methods.output import output_norms

BATCH, HEADS, GROUP, DIM, WIDTH = 2, 2, 3, 4, 9


def case(seed, n, padding=0, weighted=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    mass = 1 + torch.randint(3, (BATCH, HEADS, n), generator=g).float() if weighted else None
    slots = Slots(
        torch.randn(BATCH, HEADS, n, DIM, generator=g).to(dtype),
        torch.randn(BATCH, HEADS, n, DIM + 1, generator=g).to(dtype),
        mass,
        torch.arange(n).float().expand(BATCH, HEADS, n),
    )
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    if padding:
        slots = slots.only(live[:, None])
    queries = torch.randn(BATCH, GROUP * HEADS, n, DIM, generator=g).to(dtype)
    output = torch.randn(GROUP * HEADS, DIM + 1, WIDTH, generator=g)
    output *= torch.rand(GROUP * HEADS, DIM + 1, 1, generator=g) ** 4
    return slots, live, Observed(queries, 0.4, live=live), output


def two_stages(tokens, score, norm, first, room, epsilon):
    by_score = sorted(tokens, key=lambda t: -score[t])
    kept = by_score[: max(0, min(first, room))]
    rest = sorted(by_score[len(kept) :], key=lambda t: -(score[t] + epsilon) * norm[t])
    return {*kept, *rest[: room - len(kept)]}


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(3, 40),
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
    padding=st.integers(0, 9),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    by_head=st.booleans(),
    data=st.data(),
)
def test_it_is_its_definition(seed, n, sink, recent, padding, share, by_head, data):
    slots, live, observed, output = case(seed, n, min(padding, n - 1), seed % 2 == 1)
    sizes = st.integers(1, n - 1)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    if not by_head:
        budget[:] = budget[0, 0]
    method = CriticalKV(first_stage=share, epsilon=0.01, window=4, kernel_size=3)
    method.output = output
    asked = budget if by_head else int(budget[0, 0])
    kept = method(slots, asked, observed, sink=sink, recent=recent)
    scores = make("snapkv").__class__(window=4, kernel_size=3).observe(slots, observed).score
    means = slots.values / slots.masses().clamp(min=1).unsqueeze(-1)
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        safe = math.floor(0.2 * float(budget[row].double().mean())) if by_head else 0
        for head in range(HEADS):
            own = int(budget[row, head])
            here = kept.masses()[row, head, :own] > 0
            found = kept.positions[row, head, :own][here].long().tolist()
            if len(tokens) <= own:
                assert set(found) == set(tokens)
                continue
            mine = output[head * GROUP : (head + 1) * GROUP]
            norm = (means[row, head] @ mine).abs().sum(-1).mean(0).tolist()
            start = min(sink, own)
            last = min(recent, own - start)
            middle = tokens[start : len(tokens) - last]
            first = max(math.floor(share * own), safe) - sink - recent
            room = own - start - last
            best = two_stages(middle, scores[row, head].tolist(), norm, first, room, 0.01)
            assert set(found) == {*tokens[:start], *tokens[len(tokens) - last :], *best}


def test_the_safeguard_is_for_heads_that_share_a_budget():
    """Six of 40 tokens have the highest scores, but values of zero. They get their fifth of a
    budget of 30 only where heads have budgets of their own."""
    g = torch.Generator().manual_seed(0)
    looked_at = torch.rand(BATCH, HEADS, 40, generator=g).argsort(-1) < 6
    values = (~looked_at).float().unsqueeze(-1).repeat(1, 1, 1, DIM + 1)
    keys = torch.randn(BATCH, HEADS, 40, DIM, generator=g)
    slots = Slots(keys, values, score=looked_at.float())
    method = CriticalKV(first_stage=0.0, window=4)
    method.output = torch.ones(GROUP * HEADS, DIM + 1, WIDTH)
    assert float(method(slots, 30, scored=True).score.sum()) == 0
    by_head = method(slots, torch.full((BATCH, HEADS), 30), scored=True)
    assert float(by_head.score.sum()) == 6 * BATCH * HEADS


def test_slots_and_scores_come_back_bit_for_bit():
    slots, _, observed, output = case(3, 30, dtype=torch.bfloat16)
    method = CriticalKV(window=4)
    method.output = output.bfloat16()
    scored = method.observe(slots, observed)
    kept = method(scored, 12, scored=True, sink=1, recent=3)
    assert kept.keys.dtype == torch.bfloat16
    at = kept.positions.long()
    assert torch.equal(kept.keys, slots.take(at).keys)
    assert torch.equal(kept.values, slots.take(at).values)
    assert torch.equal(kept.score, scored.score.gather(-1, at))
    assert method(slots, 30, observed) is slots


@pytest.mark.parametrize("order", [1, 2])
def test_norms_are_those_of_the_projected_values(order, monkeypatch):
    slots, _, _, output = case(5, 23, weighted=True)
    monkeypatch.setattr("kvsketch.methods.output._BLOCK", 500)  # several blocks, the last shorter
    norms = output_norms(slots, output, "x", order)
    assert norms.shape == (BATCH, HEADS, GROUP, 23)
    for b, h, g, t in ((0, 0, 0, 0), (1, 1, 2, 22), (0, 1, 1, 7)):
        value = slots.values[b, h, t] / slots.mass[b, h, t]
        expected = torch.linalg.vector_norm(value @ output[h * GROUP + g], order)
        torch.testing.assert_close(norms[b, h, g, t], expected)


def test_without_a_projection_it_is_refused():
    slots, _, observed, output = case(1, 20)
    method = CriticalKV(window=4)
    with pytest.raises(InputError, match="criticalkv needs the weight of the model's output"):
        method(slots, 9, observed)
    method.output = output[:3]
    with pytest.raises(InputError, match=r"output \(3, 5, 9\) must be"):
        method(slots, 9, observed)
    method.output = output
    with pytest.raises(InputError, match="needs queries"):
        method(slots, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"first_stage": 1.5}, r"first_stage=1\.5"), ({"epsilon": -1}, "epsilon=-1")],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        CriticalKV(**arguments)


# --- the model's own weight -----------------------------------------------------------------------


def read(model, method="criticalkv", **kwargs):
    cache = SketchCache(model.config, method, budget=20, sink=2, recent=4, **kwargs)
    ids = torch.randint(3, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", ["llama", "opt", "mpt", "phi3"])
def test_every_layer_gets_the_weight_of_its_own_module(family):
    model = build(family)
    cache = read(model)
    for layer in cache.layers:
        module = layer.module()
        weight = layer.stream.method.output
        heads, dim, width = weight.shape
        projection = next(getattr(module, n) for n in ("o_proj", "out_proj") if hasattr(module, n))
        assert weight.data_ptr() == projection.weight.data_ptr()  # not a copy
        x = torch.randn(heads, dim, generator=torch.Generator().manual_seed(0))
        bias = 0 if projection.bias is None else projection.bias
        expected = projection(x.flatten()) - bias
        torch.testing.assert_close(torch.einsum("hd,hdw->w", x, weight), expected)
        assert width == 64


def test_a_transposed_weight_is_read_as_it_is_meant():
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=128)
    model = AutoModelForCausalLM.from_config(config).eval()
    (layer,) = read(model).layers
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    projection = layer.module().c_proj
    expected = projection(x.flatten()) - projection.bias
    found = torch.einsum("hd,hdw->w", x, layer.stream.method.output)
    torch.testing.assert_close(found, expected)


def test_copies_leave_the_weight_to_the_model():
    model = build("llama")
    cache = read(model)
    stored = io.BytesIO()
    torch.save(cache, stored)
    stored.seek(0)
    other = torch.load(stored, weights_only=False)
    assert other.layers[0].stream.method.output is None
    ids = torch.tensor([[5]])
    with torch.no_grad():
        first = model(ids, past_key_values=copy.deepcopy(cache)).logits
        second = model(ids, past_key_values=other).logits
    assert torch.equal(first, second)
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert other.layers[0].stream.method.output.data_ptr() == weight.data_ptr()
    assert weight.data_ptr() not in {t.data_ptr() for t in cache.layers[0].tensors()}


class Packed(nn.Parameter):
    """Stands for the weight of a quantized layer."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: delattr(m, "o_proj"), "which has none that kvsketch knows"),
        (lambda m: setattr(m.o_proj, "weight", Packed(m.o_proj.weight)), "not plain numbers"),
        (lambda m: setattr(m, "o_proj", m.o_proj.to("meta")), "not plain numbers here .* meta"),
        (lambda m: setattr(m, "o_proj", nn.Linear(17, 64)), "takes 17 numbers"),
    ],
)
def test_a_projection_that_cannot_be_read_is_refused(change, message):
    module = build("llama").model.layers[0].self_attn
    assert output_weight(module, 2, 16, "criticalkv").shape == (4, 16, 64)
    change(module)
    with pytest.raises(UnsupportedError, match=message):
        output_weight(module, 2, 16, "criticalkv")


def test_a_refusal_leaves_the_cache_as_it_was():
    model = build("llama")
    weight = model.model.layers[1].self_attn.o_proj.weight
    model.model.layers[1].self_attn.o_proj.weight = Packed(weight.detach())
    cache = SketchCache(model.config, "criticalkv", budget=20, sink=2, recent=4)
    with pytest.raises(UnsupportedError, match="method='criticalkv' needs the output projection"):
        model(torch.ones(1, 40, dtype=torch.int64), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_compiled_graph_shows_no_projection():
    model = build("llama")
    compiled = torch.compile(model, backend="eager")
    cache = SketchCache(model.config, "criticalkv", budget=20, sink=2, recent=4)
    ids = torch.randint(3, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="compiled graph does not show"):
            compiled(ids, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        found = compiled(ids[:, :1], past_key_values=cache).logits
        expected = model(ids[:, :1], past_key_values=read(model)).logits
    torch.testing.assert_close(found, expected)


def test_latents_are_no_values():
    with pytest.raises(UnsupportedError, match="caches latents instead of values"):
        SketchCache(DeepseekV3Config(), "criticalkv")
