"""Scores of tokens that were not read again, from those that were."""

from __future__ import annotations

import torch

from kvsketch import Observed, Slots
from kvsketch.methods.learned import learned_scores
from kvsketch.methods.scoring import recent_attention

SAMPLE = torch.arange(400).view(25, 16)[:, :4].flatten()
REST = torch.tensor([i for i in range(400) if i not in set(SAMPLE.tolist())])


def made(seed=0, rows=2):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 2, 400, 8, generator=generator)
    last = Observed(torch.randn(rows, 4, 64, 8, generator=generator), 0.3)
    return Slots(keys, values), last, generator


def ranks(x):
    return x.argsort(-1).argsort(-1).double()


def alike(x, y):
    """Rank correlation, ``[rows, heads]``."""
    x, y = (ranks(t) - ranks(t).mean(-1, keepdim=True) for t in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def test_what_values_or_the_last_queries_tell_is_learned():
    slots, last, generator = made()
    direction = torch.randn(2, 2, 8, 1, generator=generator)
    by_values = (slots.values @ direction).squeeze(-1) * 0.3 - 3
    by_attention = recent_attention(slots, last, 64)[0].log()
    for log in (by_values, by_attention, by_values + by_attention):
        truth = log.exp()
        known = torch.zeros_like(truth)
        known[..., SAMPLE] = truth[..., SAMPLE]
        found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE, last).score
        assert torch.equal(found[..., SAMPLE], truth[..., SAMPLE])
        assert (alike(found[..., REST], truth[..., REST]) > 0.97).all()
        torch.testing.assert_close(found[..., REST], truth[..., REST], rtol=0.5, atol=0)
        means = [t[..., REST].mean(-1) for t in (found, truth)]
        torch.testing.assert_close(*means, rtol=0.05, atol=0)


def test_what_cannot_be_told_is_expected():
    """Scores that nothing is to be learned from: all others get their mean, nearly."""
    slots, last, generator = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = (torch.randn(2, 2, 100, generator=generator) - 3).exp()
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE, last).score
    mean = torch.tensor(-2.5).exp()
    assert (found[..., REST].mean(-1) / mean - 1).abs().max() < 0.5
    assert (found[..., REST].log().std(-1) < 0.5).all()  # theirs is 1


def test_no_score_is_above_one():
    slots, last, _ = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = (slots.values[..., SAMPLE, 0] * 3).exp().clamp(max=1.0)
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE, last).score
    assert found.max() == 1.0


def test_heads_are_learned_apart_and_rows_too():
    slots, last, generator = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = torch.rand(2, 2, 100, generator=generator)
    both = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE, last).score
    one = Slots(slots.keys[1:], slots.values[1:], score=known[1:])
    last_one = Observed(last.queries[1:], 0.3)
    torch.testing.assert_close(learned_scores(one, SAMPLE, last_one).score, both[1:])


def test_padding_is_nothing_to_learn_from():
    slots, last, _ = made()
    truth = (slots.values[..., 0] * 0.5 - 3).exp()
    known = torch.zeros_like(truth)
    known[..., SAMPLE] = truth[..., SAMPLE]
    mass = torch.ones(2, 2, 400)
    mass[:, :, :180] = 0
    padded = Slots(slots.keys, slots.values, score=known).only(mass[:, :1] > 0)
    padded.score[..., :180] = 0.0
    found = learned_scores(padded, SAMPLE, last).score
    late = REST[REST >= 180]
    assert (found[..., :180] == 0).all()
    assert (alike(found[..., late], truth[..., late]) > 0.97).all()
    assert (found[..., late] > 0).all()


def test_a_sample_of_all_is_left_alone():
    slots, last, generator = made()
    score = torch.rand(2, 2, 400, generator=generator)
    found = learned_scores(Slots(slots.keys, slots.values, score=score), torch.arange(400), last)
    assert torch.equal(found.score, score)


def test_scores_that_are_all_the_same_stay_so():
    slots, last, _ = made()
    known = torch.full((2, 2, 400), 0.5)
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE, last).score
    torch.testing.assert_close(found, known)
