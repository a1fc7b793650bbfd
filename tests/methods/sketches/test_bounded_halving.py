"""How BalanceKV and merge-and-reduce halve a batch within a budget, slot by slot."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import Slots
from kvsketch.methods import GreedyHalving
from kvsketch.methods.sketches.balancekv_bounded import BalanceKVBounded
from kvsketch.methods.sketches.bounded import _one_of
from kvsketch.methods.sketches.merge_reduce import MergeReduceBounded
from kvsketch.methods.sketches.small_values import norm_bucket
from kvsketch.random_numbers import derived, uniform

SIGNIFICANCE = 1e-3
STREAMS = torch.tensor([[7, 8]])


def batch_of(seed, n):
    """``[1, 2, n]`` slots that have weights in both instances, in one, or in none."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 2, n, 3, generator=g).double() for _ in range(2))
    weights = 1 + torch.rand(1, 2, n, 2, generator=g)
    weights = weights * (torch.rand(1, 2, n, 2, generator=g) < 0.9)
    weights[:, 1, n - n // 4 :] = 0
    return Slots(keys, values), weights


def half_of(members, order, one_more):
    """The first half of the members by ``order``; of an odd number one more if ``one_more``."""
    kept = sorted(members, key=lambda i: order[i])
    return set(kept[: len(members) // 2 + (len(members) % 2) * bool(one_more)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(2, 50), constant=st.sampled_from([0.05, 30.0]))
def test_a_batch_is_halved_as_described(seed, n, constant):
    """Numerator and denominator keep half of their slots, those of sign +1 first. Among slots of
    the same sign the numerator chooses at random, and the denominator first takes those that the
    numerator keeps. Of fewer than 16 slots both keep the same. The numerator's weights double; the
    sum of the denominator's stays."""
    batch, weights = batch_of(seed, n)
    streams = torch.tensor([[seed, seed + 1000]])
    sketch = BalanceKVBounded(64, constant=constant)
    found, _ = sketch._halve(batch, weights, streams)
    above, below = weights.unbind(-1)
    values = batch.values * above.unsqueeze(-1)
    bucket = norm_bucket(batch.values)
    bucket = (bucket - bucket.min()).masked_fill(above == 0, int(bucket.max() - bucket.min()))
    sums = sketch._balance.signs(Slots(batch.keys, values, above), streams, bucket)[0]
    ones = Slots(batch.keys, batch.values[..., :0], below)
    masses = sketch._balance.signs(ones, streams)[0]
    ties = uniform(derived(streams, -1), n)
    coins = uniform(derived(streams, -2), 1) < 0.5
    for row in range(2):
        w = weights[0, row]
        tie, coin = ties[0, row].tolist(), coins[0, row]
        up, low = sums[0, row] > 0, masses[0, row] > 0
        members = [i for i in range(n) if w[i, 0] > 0]
        mine = [i for i in range(n) if w[i, 1] > 0]
        kept = half_of(members, {i: (not up[i], tie[i]) for i in members}, coin)
        order = {i: (not low[i], i not in kept, tie[i]) for i in mine}
        denominator = half_of(mine, order, True)
        there = sorted({*members, *mine})
        if len(there) < 16:
            both = half_of(there, {i: (not low[i], tie[i]) for i in there}, coin)
            if both & set(mine):
                kept, denominator = both & set(members), both & set(mine)
        expected = torch.zeros(n, 2)
        for i in kept:
            expected[i, 0] = 2 * w[i, 0]
        rest = sum(float(w[i, 1]) for i in denominator)
        for i in denominator:
            expected[i, 1] = w[i, 1] * w[:, 1].sum() / rest
        torch.testing.assert_close(found[0, row], expected)


def test_of_two_slots_one_is_kept_in_proportion_to_its_weight():
    """Of 20,000 pairs of weights 1 and 3 the heavy slot is kept in three of four (binomial test),
    and the kept one always has the weight of both."""
    chance = uniform(torch.tensor([3]), 20_000).T
    factor = _one_of(torch.tensor([[1.0, 3.0]]).expand(20_000, 2), chance)
    weights = factor * torch.tensor([1.0, 3.0])
    torch.testing.assert_close(weights.sum(1), torch.full((20_000,), 4.0))
    heavy = int((weights[:, 1] > 0).sum())
    assert stats.binomtest(heavy, 20_000, 0.75).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("cls", [BalanceKVBounded, MergeReduceBounded])
def test_the_oldest_are_halved_first_each_batch_with_coins_of_its_own(cls, monkeypatch):
    """With one token more than 400 slots, the 64 oldest are halved in order, in 8 batches of 8."""
    calls, original = [], cls._halve

    def halve(self, batch, weights, streams):
        calls.append((batch.positions.clone(), streams.clone()))
        return original(self, batch, weights, streams)

    monkeypatch.setattr(cls, "_halve", halve)
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 401, 3, generator=g) for _ in range(2))
    sketch = cls(400, batch_size=8, seed=1)
    sketch.extend(Slots(keys, values, positions=torch.arange(401.0).view(1, 1, 401)))
    assert len(calls) == 1
    positions, streams = calls[0]
    assert positions.flatten().tolist() == list(range(64))
    assert len(streams.flatten().unique()) == 8
    weights = sketch._live_weights()[0, 0].amax(-1)
    held = sketch.get("held").positions[0, 0]
    assert set(held[weights == 1].tolist()) == set(range(64, 401))


def test_merge_and_reduce_balances_values_as_they_are_weighted(monkeypatch):
    """A batch of different weights is halved as (k, w v, w), and its weight stays, also where the
    kept half is lighter than the other."""
    seen, original = [], GreedyHalving.half

    def half(self, slots, streams=None):
        seen.append(slots)
        return original(self, slots, streams)

    monkeypatch.setattr(GreedyHalving, "half", half)
    batch, weights = batch_of(3, 12)
    weights = weights[..., :1] + 0.5
    sketch = MergeReduceBounded(64)
    found, _ = sketch._halve(batch, weights, STREAMS)
    torch.testing.assert_close(seen[0].values, batch.values * weights)
    torch.testing.assert_close(seen[0].mass, weights[..., 0])
    torch.testing.assert_close(found.sum(2), weights.sum(2))
    share = found / weights
    for row in range(2):
        kept = share[0, row][share[0, row] > 0]
        assert len(kept) == 6
        torch.testing.assert_close(kept, kept[:1].expand(6))


def test_a_walk_that_keeps_nothing_leaves_the_batch():
    """SoftmaxBalance keeps the smaller side, which may be empty; no mass is lost then."""
    sketch = MergeReduceBounded(8, "softmax_balance", batch_size=2, seed=0)
    g = torch.Generator().manual_seed(0)
    slots = Slots(torch.randn(1, 50, 60, 3, generator=g), torch.randn(1, 50, 60, 3, generator=g))
    sketch.extend(slots)
    assert not math.isnan(float(sketch.slots.values.sum()))
    torch.testing.assert_close(sketch.slots.masses().sum(-1), torch.full((1, 50), 60.0))
