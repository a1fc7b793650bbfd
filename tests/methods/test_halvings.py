"""Kernel and greedy halving equal loops over pairs; rounds of halving; the greedy k-center."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import Slots
from kvsketch.methods import GreedyHalving, KernelHalving, kcenter
from kvsketch.methods.kcenter import KCenter
from kvsketch.random_numbers import uniform

STREAMS = torch.tensor([[5, 6]])


def tokens(seed, n, heads=2, dim=3):
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, heads, n, dim, generator=g).double() for _ in range(2))
    return Slots(keys, values, 1 + torch.rand(1, heads, n, generator=g).double())


def gram_of_pairs(slots, head):
    """Inner products of the differences of neighbours in phi(k) (x) (u, g m), with g such that u
    and g m have the same norm over all slots."""
    keys, values, mass = (t[0, head] for t in (slots.keys, slots.values, slots.mass))
    weight = values.square().sum() / mass.square().sum()
    gram = torch.exp(keys @ keys.T * 3**-0.5) * (
        values @ values.T + weight * mass[:, None] * mass[None]
    )
    by_row = gram[0::2] - gram[1::2]
    return by_row[:, 0::2] - by_row[:, 1::2]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), pairs=st.integers(1, 60), delta=st.sampled_from([0.01, 0.5]))
def test_kernel_halving_is_the_walk_of_kernel_thinning(seed, pairs, delta):
    """The choices are those of Algorithm 1a of Dwivedi and Mackey, one pair at a time, with
    a = max(b sigma sqrt(2 log(2/delta)), b^2)."""
    slots = tokens(seed, 2 * pairs)
    half = KernelHalving(delta=delta).half(slots, STREAMS)
    for head in range(2):
        gram, numbers = gram_of_pairs(slots, head), uniform(STREAMS, pairs)[0, head]
        eta, proxy = torch.zeros(pairs, dtype=torch.float64), 0.0
        for i in range(pairs):
            b2, alpha = float(gram[i, i]), float(gram[i] @ eta)
            a = max(math.sqrt(b2 * proxy * 2 * math.log(2 / delta)), b2)
            proxy += b2 * max(0.0, 1 + (b2 - 2 * a) * proxy / a**2)
            eta[i] = 1.0 if float(numbers[i]) < (1 - alpha / a) / 2 else -1.0
        expected = [2 * i + int(eta[i] < 0) for i in range(pairs)]
        assert half.index[0, head].tolist() == expected


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), pairs=st.integers(1, 60))
def test_greedy_halving_is_the_greedy_loop(seed, pairs):
    slots = tokens(seed, 2 * pairs)
    half = GreedyHalving().half(slots, STREAMS)
    for head in range(2):
        gram, numbers = gram_of_pairs(slots, head), uniform(STREAMS, pairs)[0, head]
        eta = torch.zeros(pairs, dtype=torch.float64)
        for i in range(pairs):
            alpha = float(gram[i] @ eta)
            eta[i] = -math.copysign(1, alpha) if alpha else (1.0 if numbers[i] < 0.5 else -1.0)
        assert half.index[0, head].tolist() == [2 * i + int(eta[i] < 0) for i in range(pairs)]


@pytest.mark.parametrize("cls", [KernelHalving, GreedyHalving])
def test_every_round_has_random_numbers_of_its_own(cls, monkeypatch):
    seen, original = [], cls.half

    def half(self, slots, streams=None):
        seen.append(streams)
        return original(self, slots, streams)

    monkeypatch.setattr(cls, "half", half)
    cls(seed=1).compress(tokens(0, 64), 4)
    assert len(seen) == 4
    assert len(torch.cat(seen).unique()) == 8


def test_the_lightest_are_halved_and_neighbours_are_pairs():
    """Two slots of weight 1 and four of weight 2 lie among ten of weight 8. To drop three slots,
    those six are halved in the order of the tokens, and the weights of the kept ones double."""
    mass = torch.full((1, 1, 16), 8.0)
    for place, weight in ((1, 2.0), (4, 1.0), (6, 2.0), (9, 2.0), (11, 1.0), (14, 2.0)):
        mass[..., place] = weight
    keys = torch.randn(1, 1, 16, 3, generator=torch.Generator().manual_seed(0))
    slots = Slots(keys, torch.ones(1, 1, 16, 3), mass, torch.arange(16.0)[None, None])
    seen = []

    class Watched(KernelHalving):
        def half(self, slots, streams=None):
            seen.append(slots.positions.flatten().tolist())
            return super().half(slots, streams)

    out = Watched(seed=1).compress(slots, 13)
    assert seen == [[1, 4, 6, 9, 11, 14]]
    heavy = (mass == 8).nonzero()[:, 2].tolist()
    kept = dict(zip(out.positions.flatten().tolist(), out.mass.flatten().tolist(), strict=True))
    assert all(kept[place] == 8 for place in heavy)
    assert all(kept[p] == 2 * float(mass[0, 0, int(p)]) for p in kept if p not in heavy)


def fresh_and_old(fresh, n=40):
    """Slots, and the insertion distances of all but the last ``fresh`` of them."""
    slots = tokens(1, n, heads=1)
    slots = Slots(slots.keys.float(), slots.values.float())
    score = 100 - torch.arange(float(n)).view(1, 1, n)
    score[..., n - fresh :] = 0
    return slots, score


@pytest.mark.parametrize(("fresh", "anew"), [(3, False), (10, False), (11, True)])
def test_fresh_keys_get_their_distance_to_what_is_older(fresh, anew, monkeypatch):
    """Up to a quarter of the slots may be fresh; beyond that the traversal is done anew."""
    slots, score = fresh_and_old(fresh)
    calls, original = [], kcenter.farthest_first
    monkeypatch.setattr(kcenter, "farthest_first", lambda *a: calls.append(a) or original(*a))
    out = kcenter._updated(score, slots.keys, None, 30)
    assert bool(calls) == anew
    if not anew:
        assert torch.equal(out[..., : 40 - fresh], score[..., : 40 - fresh])
        distance = torch.cdist(slots.keys[0, 0], slots.keys[0, 0])
        for i in range(40 - fresh, 40):
            torch.testing.assert_close(out[0, 0, i], distance[i, :i].min(), atol=1e-4, rtol=1e-4)


def test_a_chosen_duplicate_stays_ahead_of_what_was_not_chosen():
    """Of nine keys at three places a budget of five takes two copies, whose insertion distances are
    positive; those of the other copies are 0."""
    keys = torch.eye(3).repeat(3, 1).view(1, 1, 9, 3)
    inserted = kcenter.farthest_first(keys, None, 5)
    assert int((inserted > 0).sum()) == 5
    out = KCenter()(Slots(keys, torch.zeros_like(keys)), 5)
    assert len(out.keys[0, 0].unique(dim=0)) == 3
    assert bool((out.score > 0).all())
