"""Plans: budgets head by head, what is left to spend, and the peak of a prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from kvsketch import SketchCache
from kvsketch.budget import Budget
from kvsketch.cache import HeadBudgets
from kvsketch.cache.curves import spend


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


@pytest.mark.parametrize(("layers", "tokens"), [(4, 2400), (16, 1600)])
def test_a_measured_prefill_does_not_hold_all_layers(layers, tokens):
    """Peak bytes of everything held, against an uncompressed cache: README's claim."""
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
    cache = SketchCache(model.config, budget=0.25)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    summary = cache.summary()
    assert summary["slots"] == pytest.approx(0.25 * tokens, rel=0.02)
    assert summary["peak_kv_bytes"] <= 0.55 * summary["exact_kv_bytes"]
