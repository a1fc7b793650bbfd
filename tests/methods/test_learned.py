"""Scores of tokens that were not read again are learned from those of tokens that were."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsketch import Slots
from kvsketch.methods import learned
from kvsketch.methods.learned import corrected, learned_scores

SAMPLE = torch.arange(400).view(25, 16)[:, :4].flatten()
REST = torch.tensor([i for i in range(400) if i not in set(SAMPLE.tolist())])


def made(seed=0, rows=2):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 2, 400, 8, generator=generator)
    return Slots(keys, values), generator


def ranks(x):
    return x.argsort(-1).argsort(-1).double()


def alike(x, y):
    """Rank correlation, ``[rows, heads]``."""
    x, y = (ranks(t) - ranks(t).mean(-1, keepdim=True) for t in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def test_what_values_tell_is_learned():
    slots, generator = made()
    direction = torch.randn(2, 2, 8, 1, generator=generator)
    truth = ((slots.values @ direction).squeeze(-1) * 0.3 - 3).exp()
    known = torch.zeros_like(truth)
    known[..., SAMPLE] = truth[..., SAMPLE]
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    assert (found[..., SAMPLE] >= truth[..., SAMPLE]).all()
    torch.testing.assert_close(found, truth, rtol=0.5, atol=0)
    assert (alike(found[..., REST], truth[..., REST]) > 0.97).all()
    torch.testing.assert_close(found.mean(-1), truth.mean(-1), rtol=0.05, atol=0)


def test_what_cannot_be_told_is_expected():
    """Where scores depend neither on keys nor on values, all other tokens get about their mean."""
    slots, generator = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = (torch.randn(2, 2, 100, generator=generator) - 3).exp()
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    mean = torch.tensor(-2.5).exp()
    assert (found[..., REST].mean(-1) / mean - 1).abs().max() < 0.5
    assert (found[..., REST].log().std(-1) < 0.5).all()  # that of the known scores is 1


def test_no_score_is_above_one():
    slots, _ = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = (slots.values[..., SAMPLE, 0] * 3).exp().clamp(max=1.0)
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    assert found.max() == 1.0


def test_heads_are_learned_apart_and_rows_too():
    slots, generator = made()
    known = torch.zeros(2, 2, 400)
    known[..., SAMPLE] = torch.rand(2, 2, 100, generator=generator)
    both = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    one = Slots(slots.keys[1:], slots.values[1:], score=known[1:])
    torch.testing.assert_close(learned_scores(one, SAMPLE).score, both[1:])


def test_padding_is_nothing_to_learn_from():
    slots, _ = made()
    truth = (slots.values[..., 0] * 0.5 - 3).exp()
    known = torch.zeros_like(truth)
    known[..., SAMPLE] = truth[..., SAMPLE]
    mass = torch.ones(2, 2, 400)
    mass[:, :, :180] = 0
    padded = Slots(slots.keys, slots.values, score=known).only(mass[:, :1] > 0)
    padded.score[..., :180] = 0.0
    found = learned_scores(padded, SAMPLE).score
    late = REST[REST >= 180]
    assert (found[..., :180] == 0).all()
    assert (alike(found[..., late], truth[..., late]) > 0.97).all()
    assert (found[..., late] > 0).all()


def test_what_a_seam_hides_is_told_too():
    """A token of the sample whose own score is almost 0 gets one from those with similar values."""
    slots, _ = made()
    truth = (slots.values[..., 0] * 0.3 - 3).exp()
    known = torch.zeros_like(truth)
    known[..., SAMPLE] = truth[..., SAMPLE]
    known[..., 32] = 1e-6
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    assert (found[..., 32] > 0.3 * truth[..., 32]).all()


def test_scores_that_are_all_the_same_stay_so():
    slots, _ = made()
    known = torch.full((2, 2, 400), 0.5)
    found = learned_scores(Slots(slots.keys, slots.values, score=known), SAMPLE).score
    torch.testing.assert_close(found, known)


@given(rows=st.integers(1, 30), part=st.integers(1, 12), wide=st.integers(1, 3))
def test_a_sum_in_parts_is_the_sum(rows, part, wide):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(2, 3, rows, n, generator=generator).double() for n in (4, wide))
    torch.testing.assert_close(learned._sums_of_products(x, y, part), x.mT @ y)


def test_an_echo_is_corrected_by_a_sample_in_every_head():
    """Of the difference of the two in logarithms half is taken off the echo's scores; no token of
    the sample scores less than in it. A head that no query attends to stays so, and padding."""
    slots, generator = made()
    echo, known = torch.rand(2, 2, 2, 400, generator=generator)
    known = torch.full((2, 2, 1), 0.25) * echo
    known[1, 0], echo[1, 0] = 0.0, 0.0
    found = corrected(Slots(slots.keys, slots.values, score=known), SAMPLE, echo).score
    torch.testing.assert_close(found, echo * 0.5)
    more = known.index_fill(2, SAMPLE[-3:], 2.0)
    found = corrected(Slots(slots.keys, slots.values, score=more), SAMPLE, echo).score
    assert (found[..., SAMPLE[-3:]] == 2.0).all()
    assert (found[0, ..., REST] > echo[0, ..., REST] * 0.5).all()
    live = torch.ones(2, 1, 400).index_fill(2, SAMPLE[:10], 0.0).expand(2, 2, 400)
    known = torch.where(live > 0, known, 9.0)
    padded = Slots(slots.keys, slots.values * live.unsqueeze(-1), live, score=known)
    found = corrected(padded, SAMPLE, echo).score
    assert not found[..., SAMPLE[:10]].any()
    torch.testing.assert_close(found[0, ..., REST], echo[0, ..., REST] * _ratio(known, echo)[0])


def _ratio(known, echo):
    """Of a sample without its first ten tokens."""
    known, echo = (t[..., SAMPLE[10:]].sum(-1, keepdim=True) for t in (known, echo))
    return (known / echo).sqrt()
