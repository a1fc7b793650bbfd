"""CaM equals its rules, computed for one head and one token at a time in float64.

tests/benchmarks/test_peers.py checks that it merges as kvpress does."""

from __future__ import annotations

import copy

import pytest
import torch
from drawn import BATCH, HEADS, case, streamed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import InputError, Slots
from kvsketch.methods import H2O, CaM


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(3, 40),
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
    padding=st.integers(0, 9),
    neighbours=st.integers(1, 12),
    by_head=st.booleans(),
    data=st.data(),
)
def test_it_is_its_definition(seed, n, sink, recent, padding, neighbours, by_head, data):
    slots, live, observed = case(seed, n, min(padding, n - 1), seed % 2 == 1)
    sizes = st.integers(1, n - 1)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    if not by_head:
        budget[:] = budget[0, 0]
    wanted = budget if by_head else int(budget[0, 0])
    compressor = CaM(neighbours, seed)
    numbers = copy.deepcopy(compressor).random((BATCH, HEADS, n), slots.keys.device)
    out = compressor(slots, wanted, observed, sink=sink, recent=recent, decoding=True)
    same = H2O()(slots, wanted, observed, sink=sink, recent=recent)
    assert torch.equal(out.masses(), same.masses())
    there = same.masses() > 0
    for name in ("keys", "positions", "score"):
        assert torch.equal(getattr(out, name)[there], getattr(same, name)[there])
    score = H2O().observe(slots, observed).score.double()
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            at = there[row, head].nonzero().flatten().tolist()
            kept = [int(out.positions[row, head, i]) for i in at]
            expected = {t: slots.values[row, head, t].clone() for t in kept}
            for number, token in enumerate(tokens):
                if token in kept:
                    continue
                after = [t for t in kept if t > token][:neighbours]
                if not after:
                    continue
                mean = sum(float(score[row, head, t]) for t in after) / len(after)
                if float(numbers[row, head, number]) * mean < float(score[row, head, token]):
                    for t in after:
                        expected[t] += slots.values[row, head, token] / len(after)
            for i, token in zip(at, kept, strict=True):
                torch.testing.assert_close(out.values[row, head, i], expected[token])


def test_what_a_prompt_evicts_is_dropped():
    slots, _, observed = case(1, 40)
    out = CaM(4)(slots, 12, observed, sink=1, recent=3)
    same = H2O()(slots, 12, observed, sink=1, recent=3)
    for name, tensor in same.tensors().items():
        assert torch.equal(out.tensors()[name], tensor)


def test_kept_tokens_before_all_that_goes_are_what_they_were():
    slots, _, _ = case(2, 30)
    score = torch.zeros(BATCH, HEADS, 30)
    score[..., :10], score[..., 10:20], score[..., 20:] = 3.0, 1.0, 2.0
    scored = Slots(slots.keys, slots.values, score=score)
    out = CaM(4)(scored, 20, scored=True, decoding=True)
    assert torch.equal(out.values[:, :, :10], slots.values[:, :, :10])
    assert torch.equal(out.values[:, :, 14:], slots.values[:, :, 24:])
    changed = (out.values[:, :, 10:14] != slots.values[:, :, 20:24]).any(-1)
    assert bool(changed.all())  # each of ten tokens is merged with probability 1/2
    assert out.mass is None


def test_a_row_that_loses_nothing_draws_as_often_as_its_neighbours():
    """A padded row that fits its budget loses nothing at the first compression; at the second its
    random numbers are those that it has alone."""
    padded, _, _ = case(5, 30, padding=15)
    full, _, _ = case(6, 30)
    score = torch.rand(BATCH, HEADS, 30, generator=torch.Generator().manual_seed(1))

    def twice(number):
        one, found = CaM(3, seed=2), []
        for slots in (padded, full):
            slots = Slots(slots.keys, slots.values, slots.masses(), score=score)
            some = slots.map(lambda t: t[:number])
            found.append(one(some, 15, scored=True, decoding=True))
        return found

    for alone, beside in zip(twice(1), twice(2), strict=True):
        torch.testing.assert_close(alone.values, beside.values[:1])


def test_a_token_of_no_attention_goes_nowhere_and_one_of_all_goes_always():
    values = torch.tensor([1.0, 10.0, 0.0, 0.0])[None, None, :, None]
    keys = torch.ones(1, 1, 4, 2)
    score = torch.tensor([[[0.0, 5.0, 0.0, 0.0]]])
    slots = Slots(keys, values, score=score)
    for seed in range(5):
        # the two recent tokens stay, and their mean attention is 0
        out = CaM(2, seed)(slots, 2, recent=2, scored=True, decoding=True)
        assert out.values.flatten().tolist() == [5.0, 5.0]


def test_a_stream_merges_what_decoding_evicts_within_its_budget():
    slots, _, observed = case(2, 60)
    changed = []
    for held in streamed("cam", slots, observed):
        at = held.positions.long().unsqueeze(-1).expand_as(held.values)
        assert float(held.masses().max()) == 1
        changed.append(not torch.equal(held.values, slots.values.gather(2, at)))
    assert not changed[0]
    assert changed[-1]


@pytest.mark.parametrize("neighbours", [0, 2.5])
def test_bad_arguments_are_named(neighbours):
    with pytest.raises(InputError, match=f"neighbours={neighbours}"):
        CaM(neighbours)
