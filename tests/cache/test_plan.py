"""Plans: budgets per head, the budget that is left, and the peak of a prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from kvsketch import Observed, SketchCache, Slots
from kvsketch.budget import Budget
from kvsketch.cache import HeadBudgets, windowed
from kvsketch.cache.curves import spend
from kvsketch.cache.stream import Stream


@settings(max_examples=200, deadline=None)
@given(
    value=st.one_of(st.integers(1, 500), st.floats(0.01, 1.0)),
    shares=st.lists(st.floats(0.01, 4.0), min_size=1, max_size=6),
    limit=st.one_of(st.none(), st.integers(1, 300)),
    tokens=st.integers(1, 2000),
)
def test_budgets_of_heads_are_those_of_each_head(value, shares, limit, tokens):
    limit = None if isinstance(value, int) else limit
    rows = [[Budget(value, share, limit) for share in shares] for _ in range(2)]
    together = HeadBudgets(rows, by_row=True).slots(tokens, 2)
    assert together.tolist() == [[budget.slots(tokens) for budget in row] for row in rows]


@settings(max_examples=200, deadline=None)
@given(
    kept=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8),
    most=st.lists(st.floats(0.05, 1.0), min_size=8, max_size=8),
    share=st.floats(0.05, 1.0),
)
def test_what_a_head_cannot_spend_goes_to_the_others(kept, most, share):
    limit = torch.tensor(most[: len(kept)], dtype=torch.float64)
    total = share * float(limit.sum())
    found = spend(torch.tensor(kept, dtype=torch.float64), total, limit)
    assert bool((found <= limit + 1e-12).all())
    if sum(min(a, b) for a, b in zip(kept, most, strict=False)) <= total:
        assert float(found.sum()) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "tokens", "allocation"),
    [(4, 4000, "measured"), (16, 1600, "measured"), (16, 1600, None)],
)
def test_a_prefill_does_not_hold_all_layers(layers, tokens, allocation):
    """The peak of a prefill whose budgets depend on all layers is at most 55% of the uncompressed
    cache's bytes, whether errors are measured or scores compared."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
        )
    ).eval()
    ids = torch.randint(0, 100, (1, tokens), generator=torch.Generator().manual_seed(1))
    cache = SketchCache(model.config, budget=0.25, bits=16, allocation=allocation)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    summary = cache.summary()
    assert summary["slots"] == pytest.approx(0.25 * tokens, rel=0.02)
    assert summary["peak_kv_bytes"] <= 0.55 * summary["exact_kv_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
def test_a_deep_model_compresses_each_layer_a_few_times(bits, monkeypatch):
    """Every layer changes the bounds of all layers before it, by little."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    calls, compress = [], Stream._compress

    def counted(stream, *args, **kwargs):
        calls.append(stream)
        return compress(stream, *args, **kwargs)

    monkeypatch.setattr(Stream, "_compress", counted)
    cache = SketchCache(config, budget=0.25, bits=bits)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config).eval()
        model(torch.arange(800).remainder(97).unsqueeze(0), past_key_values=cache)
    assert cache.summary()["slots"] < 800
    assert len(calls) <= 32 * {16: 4, 4: 2}[bits]


def waiting(method: str, tokens: int) -> Stream:
    """A layer that has read a prompt and has no budget yet."""
    generator = torch.Generator().manual_seed(2)
    shape = (1, 2, tokens, 8)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    queries = 2 * torch.randn(1, 4, tokens, 8, generator=generator)
    stream = Stream(windowed(method), None)
    stream.extend(Slots(keys, values, positions=torch.arange(1.0 * tokens).expand(1, 2, -1)))
    stream.settle(Observed(queries, 8**-0.5), prefill=True)
    return stream


def of_all_heads(kept: float) -> HeadBudgets:
    return HeadBudgets([[Budget(kept)] * 2], measured=True)


@pytest.mark.parametrize("method", ["h2o", "knorm"])
def test_a_bound_first_changes_nothing_where_scores_stay(method):
    """Slots compressed to a bound and then to the budget are those compressed to the budget at
    once: no query counts twice."""
    once, twice = waiting(method, 400), waiting(method, 400)
    twice.spend(of_all_heads(0.6), provisional=True)
    for stream in (once, twice):
        stream.spend(of_all_heads(0.2))
    assert torch.equal(once.slots.positions, twice.slots.positions)
    if once.slots.score is not None:
        torch.testing.assert_close(once.slots.score, twice.slots.score)


@pytest.mark.parametrize("method", ["heavy_merge", "snapkv"])
def test_under_a_bound_the_last_queries_see_all_their_tokens(method):
    """Under a bound the tokens of the query window stay, so that scores and fit of the final
    compression use the whole window."""
    stream = waiting(method, 400)
    window = stream.method.window
    stream.spend(of_all_heads(0.6), provisional=True)
    assert stream.scores.queries.count == window
    newest = torch.arange(400.0 - window, 400).expand(1, 2, -1)
    assert torch.equal(stream.slots.positions[:, :, -window:], newest)
    assert stream.slots.mass is None or bool((stream.slots.mass[:, :, -window:] == 1).all())
    stream.spend(of_all_heads(0.2))
    assert stream.scores.queries.count == 0
    assert stream.slots.count == 80


@pytest.mark.parametrize("method", ["snapkv", "tova"])
def test_a_prompt_that_is_held_back_is_compressed_as_at_once(method):
    """Of a prompt in chunks the last queries wait for its end, and each knows whether it is
    padding."""
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 150, 8, generator=g) for _ in range(2))
    queries = 2 * torch.randn(2, 4, 150, 8, generator=g)
    live = torch.ones(2, 150, dtype=torch.bool)
    live[1, :100] = live[1, 125:128] = False
    found = []
    for chunks in ([150], [130, 20], [60, 80, 10]):
        stream = Stream(windowed(method, 2, 6), Budget(20))
        for chunk in chunks:
            part = slice(stream.seen, stream.seen + chunk)
            stream.extend(Slots(keys[:, :, part], values[:, :, part]))
            stream.mark_padding(live[:, part])
            padding = None if bool(live[:, part].all()) else live[:, part]
            observed = Observed(queries[:, :, part], 8**-0.5, live=padding)
            stream.settle(observed, prefill=True, hold=part.stop < 150)
        found.append(stream.slots)
    for other in found[1:]:
        for name, tensor in found[0].tensors().items():
            torch.testing.assert_close(other.tensors()[name], tensor)
