"""Compactor equals its rule, computed one row at a time in float64; its random projection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import InputError, Observed, Slots
from kvsketch.methods.compactor import Compactor, leverage_scores

BATCH, HEADS, GROUP, DIM, SKETCH = 2, 2, 2, 6, 4
FIXED = torch.randn(BATCH, HEADS, DIM, SKETCH, generator=torch.Generator().manual_seed(5))


class Fixed(Compactor):
    def _gaussian(self, keys):
        return FIXED


def case(seed, n, padding=0, weighted=False, softcap=None):
    g = torch.Generator().manual_seed(seed)
    mass = 1 + torch.randint(3, (BATCH, HEADS, n), generator=g).float() if weighted else None
    slots = Slots(
        torch.randn(BATCH, HEADS, n, DIM, generator=g) + 1,
        torch.randn(BATCH, HEADS, n, DIM, generator=g),
        mass,
    )
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    if padding:
        slots = slots.only(live[:, None])
    queries = torch.randn(BATCH, GROUP * HEADS, n, DIM, generator=g)
    return slots, Observed(queries, 0.4, softcap, live=live if padding else None), live


def standard(rows):
    flat = torch.stack(rows)
    return (flat - flat.mean()) / max(float(flat.std()), 1e-6)


def row_scores(slots, observed, b, tokens, chunk, blending):
    """The scores of the given tokens, ``[num_key_value_heads, tokens]``."""
    attended, leverage = [], []
    for h in range(HEADS):
        mass = slots.masses()[b, h, tokens].double()
        keys = slots.keys[b, h, tokens].double()
        values = slots.values[b, h, tokens].double() / mass.unsqueeze(-1)
        received = torch.zeros(len(tokens), dtype=torch.float64)
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            for head in range(h * GROUP, (h + 1) * GROUP):
                asked = observed.queries[b, head, tokens[part]].double()
                logits = asked @ keys[part].T * observed.scaling
                if observed.softcap is not None:
                    logits = observed.softcap * torch.tanh(logits / observed.softcap)
                share = logits.exp() * mass[part]
                received[part] += (share / share.sum(-1, keepdim=True)).sum(0) / GROUP
        weighed = (received * values.norm(dim=-1)).tolist()
        wide = [0.0, *weighed, 0.0]
        smooth = [sum(wide[i : i + 3]) / 3 for i in range(len(weighed))]
        attended.append(torch.tensor(smooth, dtype=torch.float64))
        x = (keys - keys.mean(0)) @ FIXED[b, h].double()
        inverse = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(SKETCH, dtype=torch.float64))
        leverage.append((x @ inverse @ x.T).diagonal())
    return blending * standard(leverage) + standard(attended)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(9, 60),
    chunk=st.integers(1, 20),
    sink=st.integers(0, 4),
    recent=st.integers(0, 3),
    padding=st.sampled_from([0, 0, 1, 5]),
    blending=st.sampled_from([0.0, 0.35, 2.0]),
)
def test_scores_are_their_definition(seed, n, chunk, sink, recent, padding, blending):
    softcap = 3.0 if seed % 3 == 0 else None
    slots, observed, live = case(seed, n, padding, seed % 2 == 1, softcap)
    method = Fixed(chunk=chunk, sketch=SKETCH, blending=blending, sink=sink, recent=recent)
    found = method.observe(slots, observed).score
    for b in range(BATCH):
        tokens = live[b].nonzero().flatten()
        middle = tokens[sink : len(tokens) - recent]
        if len(middle):
            expected = row_scores(slots, observed, b, middle, chunk, blending)
            torch.testing.assert_close(found[b][:, middle].double(), expected, rtol=1e-3, atol=1e-3)
        ends = torch.cat([tokens[:sink], tokens[len(tokens) - recent :]])
        if len(ends) and len(middle):
            assert float(found[b][:, ends].min()) > float(found[b][:, middle].max())


def test_later_tokens_are_scored_among_themselves_and_earlier_scores_stay():
    slots, observed, _ = case(3, 40)
    method = Fixed(chunk=8, sketch=SKETCH, sink=2, recent=2)
    first = method.observe(slots.narrow(0, 30), observed.narrow(0, 30))
    score = torch.cat([first.score, torch.zeros(BATCH, HEADS, 10)], dim=-1)
    both = Slots(slots.keys, slots.values, score=score)
    found = method.observe(both, observed.narrow(30, 10)).score
    assert torch.equal(found[..., :30], first.score)
    for b in range(BATCH):
        expected = row_scores(slots, observed, b, torch.arange(30, 40), 8, method.blending)
        torch.testing.assert_close(found[b, :, 30:].double(), expected, rtol=1e-3, atol=1e-3)
    one = Slots(slots.keys[:, :, :31], slots.values[:, :, :31], score=score[..., :31])
    alone = method.observe(one, observed.narrow(30, 1)).score[..., 30]
    assert float(alone.mean(1).abs().max()) < 1e-6


def test_the_projection_is_gaussian_and_its_own_in_every_head():
    """The projection is normally distributed (Kolmogorov-Smirnov test at significance 1e-3), heads
    are uncorrelated, and a seed repeats it."""
    keys = torch.zeros(3, 4, 1, 64)
    method = Compactor(sketch=48, seed=2)
    drawn = method._gaussian(keys)
    assert stats.kstest((drawn * 48**0.5).flatten().numpy(), "norm").pvalue > 1e-3
    flat = drawn.flatten(0, 1).flatten(1)
    apart = torch.corrcoef(flat) - torch.eye(12)
    assert float(apart.abs().max()) < 5 / (64 * 48) ** 0.5
    assert not torch.equal(drawn, method._gaussian(keys))
    assert torch.equal(drawn, Compactor(sketch=48, seed=2)._gaussian(keys))


def test_an_outlier_has_the_highest_leverage():
    """A projection to as many dimensions as keys have hardly changes leverage scores; with fewer,
    an outlier still has the highest."""
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 50, 16, generator=g)
    keys[:, :, 17] = 30 * torch.eye(16)[3]
    live = torch.ones(1, 50, dtype=torch.bool)
    for size in (4, 16):
        sketch = torch.randn(1, 2, 16, size, generator=g) / size**0.5
        found = leverage_scores(keys, live, sketch)
        assert found.argmax(-1).tolist() == [[17, 17]]
        torch.testing.assert_close(
            found.sum(-1), torch.full((1, 2), float(size)).double(), rtol=0.02, atol=0
        )
    exact = leverage_scores(keys, live, torch.eye(16).expand(1, 2, 16, 16))
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.08)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"sketch": 0}, "sketch=0"),
        ({"sink": -1}, "sink=-1"),
        ({"recent": 1.5}, r"recent=1\.5"),
        ({"blending": -1}, "blending=-1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        Compactor(**arguments)
