"""Budgets by scores compared over heads, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import SketchCache
from kvsketch.cache.needs import by_need
from tiny_model import small_llama


def by_loop(scores, budget, sink, recent, safeguard):
    """The slots of every head: sinks and recent tokens, its best tokens up to the safeguard, and
    its tokens among the best of all heads."""
    n = scores[0].shape[1]
    first = min(sink, budget, n)
    last = min(recent, budget - first, n - first)
    heads = [row for layer in scores for row in layer.tolist()]
    kept = [set(range(first)) | set(range(n - last, n)) for _ in heads]
    rest = []
    for number, row in enumerate(heads):
        order = sorted(range(first, n - last), key=lambda i, row=row: -row[i])
        safe = max(0, int(budget * safeguard) - first - last)
        kept[number] |= set(order[:safe])
        rest += [(row[i], number, i) for i in order[safe:]]
    total = min(budget, n) * len(heads)
    for _, number, i in sorted(rest, reverse=True):
        if sum(map(len, kept)) < total:
            kept[number].add(i)
    return [len(k) for k in kept]


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    n=st.integers(1, 40),
    budget=st.integers(1, 50),
    sink=st.integers(0, 5),
    recent=st.integers(0, 8),
    safeguard=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 9),
)
def test_as_a_plain_loop(layers, heads, n, budget, sink, recent, safeguard, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.rand(heads, n, generator=generator) for _ in range(layers)]
    found = by_need(scores, budget, sink, recent, safeguard)
    assert [len(x) for x in found] == [heads] * layers
    assert torch.cat(found).tolist() == by_loop(scores, budget, sink, recent, safeguard)


def test_padding_is_never_counted_before_tokens():
    scores = [torch.tensor([[-torch.inf] * 6 + [0.1] * 4, [0.5] * 10])]
    assert by_need(scores, 7, 0, 0)[0].tolist() == [4, 10]


@pytest.mark.parametrize("tokens", [411, 1000])
@pytest.mark.parametrize("allocation", ["layer", "global"])
def test_a_number_of_slots_is_kept_to_the_slot(allocation, tokens):
    """A budget of 300 slots per head is used exactly, whatever share of the prompt it is."""
    model = small_llama().eval()
    cache = SketchCache(model.config, "h2o", budget=300, allocation=allocation)
    ids = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    held = torch.stack([layer.stream.held for layer in cache.layers])
    assert int(held.sum()) == 300 * held.numel()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(9, 30), min_size=2, max_size=2), min_size=1, max_size=3),
    budget=st.integers(9, 35),
    seed=st.integers(0, 9),
)
def test_heads_of_any_size_compete_with_what_they_have(sizes, budget, seed):
    """The first and the last slots of every head that are there are kept, and the others compete,
    wherever they are. What no slot needs is the same for all heads."""
    sink, recent = 2, 4
    generator = torch.Generator().manual_seed(seed)
    layers, own = [], []
    for heads in sizes:
        width = max(heads)
        scores = torch.rand(len(heads), width, generator=generator)
        own += [scores[h, width - size :].tolist() for h, size in enumerate(heads)]
        there = torch.arange(width) >= width - torch.tensor(heads).unsqueeze(1)
        layers.append(scores.masked_fill(~there, -torch.inf))
    widest = max(map(max, sizes))
    free = (min(budget, widest) - sink - recent) * len(own)
    rest = sorted(
        ((x, h) for h, row in enumerate(own) for x in row[sink : len(row) - recent]), reverse=True
    )
    wanted = [sink + recent + max(0, free - len(rest)) // len(own)] * len(own)
    for _, head in rest[:free]:
        wanted[head] += 1
    assert torch.cat(by_need(layers, budget, sink, recent)).tolist() == wanted
