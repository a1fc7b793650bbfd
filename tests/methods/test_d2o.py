"""D2O equals its rules, computed for one head and one token at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from drawn import BATCH, HEADS, case, check_stream
from hypothesis import given, settings
from hypothesis import strategies as st

from families import build
from kvsketch import InputError, Observed, SketchCache, Slots
from kvsketch.cache.needs import by_variance
from kvsketch.methods import D2O, H2O


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def merged(slots, row, head, kept, lost, before, decay):
    """The keys and values of the kept tokens after merging, by token, and the new threshold."""
    keys, means = slots.keys[row, head], slots.mean_values()[row, head]
    mass = slots.masses()[row, head]
    best = {i: max(kept, key=lambda j, i=i: cosine(keys[i], keys[j])) for i in lost}
    u = {i: cosine(keys[i], keys[j]) for i, j in best.items()}
    threshold = before
    if lost:
        mean = sum(u.values()) / len(u)
        threshold = mean if before is None else decay * mean + (1 - decay) * before
    found = {}
    for j in kept:
        group = [i for i in lost if best[i] == j and u[i] >= threshold - 1e-12]
        total = math.e + sum(math.exp(u[i]) for i in group)
        key, value = math.e * keys[j], math.e * means[j]
        for i in group:
            key, value = key + math.exp(u[i]) * keys[i], value + math.exp(u[i]) * means[i]
        found[j] = (key / total, value / total * mass[j], mass[j], len(group))
    return found, threshold


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(3, 40),
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
    padding=st.integers(0, 9),
    by_head=st.booleans(),
    decay=st.sampled_from([0.3, 1.0]),
    data=st.data(),
)
def test_it_is_its_definition_twice_in_a_row(seed, n, sink, recent, padding, by_head, decay, data):
    compressor = D2O(decay=decay)
    before = {}
    for turn in range(2):
        slots, live, observed = case(2 * seed + turn, n, min(padding, n - 1), seed % 2 == 1)
        sizes = st.integers(1, n - 1)
        budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
        if not by_head:
            budget[:] = budget[0, 0]
        given = budget if by_head else int(budget[0, 0])
        out = compressor(slots, given, observed, sink=sink, recent=recent)
        same = H2O()(slots, given, observed, sink=sink, recent=recent)
        assert torch.equal(out.masses(), same.masses())
        there = same.masses() > 0
        assert torch.equal(out.positions[there], same.positions[there])
        assert torch.equal(out.score[there], same.score[there])
        for row in range(BATCH):
            tokens = live[row].nonzero().flatten().tolist()
            for head in range(HEADS):
                there = (out.masses()[row, head] > 0).nonzero().flatten().tolist()
                kept = [int(out.positions[row, head, i]) for i in there]
                lost = [t for t in tokens if t not in kept]
                place = (row, head)
                expected, before[place] = merged(
                    slots, row, head, kept, lost, before.get(place), decay
                )
                for i, token in zip(there, kept, strict=True):
                    key, value, mass, _ = expected[token]
                    torch.testing.assert_close(out.keys[row, head, i], key)
                    torch.testing.assert_close(out.values[row, head, i], value)
                    assert out.masses()[row, head, i] == mass


def test_a_kept_token_into_which_nothing_goes_is_what_it_was():
    slots, _, observed = case(1, 40)
    out = D2O()(slots, 12, observed, sink=1, recent=3)
    at = out.positions.long().unsqueeze(-1)
    same = (out.keys == slots.keys.gather(2, at.expand_as(out.keys))).all(-1)
    assert 0 < same.sum() < same.numel()
    assert out.mass is None
    values = (out.values == slots.values.gather(2, at.expand_as(out.values))).all(-1)
    assert torch.equal(same, values)


def test_tokens_unlike_all_others_are_dropped():
    """Of two evicted tokens, the one whose key is parallel to a kept key is merged into it; the one
    whose key points away from all others is dropped."""
    keys = torch.tensor([[1.0, 0], [2, 0], [-1, -1], [0, 1]])[None, None]
    values = torch.arange(4.0)[None, None, :, None].expand(1, 1, 4, 3)
    slots = Slots(keys, values, score=torch.tensor([[[9.0, 1, 1, 9]]]))
    out = D2O()(slots, 2, scored=True)
    half = (math.e * 1 + math.e * 2) / (2 * math.e)
    torch.testing.assert_close(out.keys[0, 0], torch.tensor([[half, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(out.values[0, 0, :, 0], torch.tensor([0.5, 3.0]))


def test_many_tokens_are_matched_in_blocks(monkeypatch):
    slots, _, observed = case(3, 60)
    whole = D2O()(slots, 9, observed)
    monkeypatch.setattr("kvsketch.methods.d2o._BLOCK", 100)
    parts = D2O()(slots, 9, observed)
    torch.testing.assert_close(parts.keys, whole.keys)
    torch.testing.assert_close(parts.values, whole.values)


def test_the_threshold_follows_its_rows_and_can_be_forgotten():
    slots, _, observed = case(4, 30)
    one = D2O()
    one(slots, 10, observed)
    first = one.threshold
    assert first.shape == (BATCH, HEADS)
    one.map_batch(lambda t: t.flip(0))
    assert torch.equal(one.threshold, first.flip(0))
    one.reset()
    assert one.threshold is None
    assert one.tensors() == []
    one(slots.map(lambda t: t[:1]), 10, Observed(observed.queries[:1], 0.4))
    torch.testing.assert_close(one.threshold, first[:1])


def test_a_stream_stays_within_its_budget():
    slots, _, observed = case(2, 60)
    check_stream("d2o", slots, observed)


# --- budgets by variance -------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 6),
    n=st.integers(2, 60),
    budget=st.integers(1, 60),
    window=st.integers(0, 20),
    padding=st.sampled_from([0, 1, 20]),
)
def test_budgets_are_the_softmax_of_minus_the_spread(seed, layers, n, budget, window, padding):
    g = torch.Generator().manual_seed(seed)
    scores = [torch.rand(3, n, generator=g) ** (1 + 3 * i) for i in range(layers)]
    for score in scores:
        score[:, : min(padding, n - 2)] = -torch.inf
    found = by_variance(scores, budget, window)
    assert all(len(set(layer.tolist())) == 1 for layer in found)
    each = [int(layer[0]) for layer in found]
    least = min(window, budget, n)
    assert all(least <= count <= n for count in each)
    whole = min(budget, n) * layers
    assert whole - layers <= sum(each) <= whole
    spread = []
    for score in scores:
        variance = score[:, min(padding, n - 2) :].double().var(-1)
        low, high = variance.min(), variance.max()
        spread.append(float(((variance - low) / (high - low + 1e-6)).mean()))
    weight = torch.softmax(-torch.tensor(spread, dtype=torch.float64), 0) * layers
    expected = least + weight * (min(budget, n) - least)
    if bool((expected <= n).all()):
        assert all(abs(a - b) <= 1 for a, b in zip(each, expected.tolist(), strict=True))
    order = sorted(range(layers), key=lambda i: spread[i])
    assert [each[i] for i in order] == sorted(each, reverse=True)


def test_what_a_layer_cannot_use_goes_to_the_others_and_padding_says_nothing():
    even = torch.stack([torch.tensor([1.0, 2.0] * 10), torch.tensor([1.0, 2.0] * 10)])
    even[1, 0] = 9.0  # the normalized variances are 0 and 1, on average 1/2
    steep = even.clone()
    steep = torch.cat([steep, steep[1:], steep[1:]])  # 0, 1, 1 and 1, on average 3/4
    found = by_variance([even, steep], 19, 0)
    assert int(found[0][0]) == 20
    assert int(found[1][0]) == 18
    padded = torch.cat([torch.full((2, 7), -torch.inf), even], 1)
    tight = by_variance([even, steep], 8, 0)
    wide = torch.cat([torch.full((4, 7), -torch.inf), steep], 1)
    assert [x.tolist() for x in by_variance([padded, wide], 8, 0)] == [x.tolist() for x in tight]


@pytest.mark.parametrize("budget", [0.25, 40])
def test_layers_of_a_model_get_different_budgets_within_the_whole(budget):
    model = build("llama")
    ids = torch.randint(3, 90, (2, 200), generator=torch.Generator().manual_seed(0))
    cache = SketchCache(model.config, "d2o", budget=budget, sink=2, recent=8)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    held = torch.stack([layer.stream.held for layer in cache.layers]).double()
    average = 40 if budget == 40 else 50
    assert bool((held.mean((0, 2)) <= average + 1).all())
    assert bool((held.mean((0, 2)) > average - 2).all())
    assert held.std() > 0
    assert all(layer.stream.slots.masses().max() == 1 for layer in cache.layers)
    for _ in range(20):
        with torch.no_grad():
            out = model(ids[:, :1], past_key_values=cache)
    assert bool(torch.isfinite(out.logits).all())
    thresholds = [layer.stream.method.threshold for layer in cache.layers]
    assert all(t.shape == (2, 2) for t in thresholds)
    cache.reset()
    assert cache.nbytes() == 0


@pytest.mark.parametrize("decay", [0, 1.5, True])
def test_bad_arguments_are_named(decay):
    with pytest.raises(InputError, match=f"decay={decay}"):
        D2O(decay=decay)
