"""Attention of a second reading, computed in pieces, equals the reference in one piece."""

from __future__ import annotations

import pytest
import torch

from kvsketch import Observed, Slots
from kvsketch.estimator import attend, attention_scores
from kvsketch.observed import causal
from kvsketch.reread import SINK, attend_again, fits, largest_share, looked_at

ABOUTS = [slice(0, 30), slice(2, 9), slice(10, 20), slice(20, 30), torch.tensor([0, 1, 9, 10, 28]),
          torch.tensor([7, 8, 20])]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def made(dtype=torch.float64, heads=4, n=30, q=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, n + q, 8, generator=generator, dtype=torch.float64)
    queries = 2 * torch.randn(2, heads, q, 8, generator=generator, dtype=torch.float64)
    return Observed(queries.to(dtype), 0.5), Slots(keys.to(dtype), values.to(dtype))


def seen_by(about, n, q):
    """The slots that scores are relative to, bool ``[n + q]``."""
    start = about.start if isinstance(about, slice) else int(about[0])
    found = torch.zeros(n + q, dtype=torch.bool)
    found[: min(SINK, start)] = found[n:] = True
    found[about] = True
    return found


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("about", ABOUTS, ids=str)
def test_pieces_are_the_whole(about, dtype, heads):
    asked, slots = made(dtype, heads)
    n, q = 30, 7
    assert fits(asked, slots)
    near = causal(q, n + q, torch.device("cpu")) & seen_by(about, n, q)
    exact = {"queries": asked.queries.double(), "slots": slots.map(lambda t: t.double())}
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    out, total = attend_again(asked, slots, about, everything=False)
    wanted = attend(**exact, scaling=0.5, mask=near)
    torch.testing.assert_close(out, wanted.to(dtype), **tolerance)
    scores = attention_scores(*exact.values(), 0.5, None, near, None)
    log = scores.logsumexp(-1).flatten(1, 2)
    torch.testing.assert_close(total.double(), log, rtol=1e-2 if tolerance else 1e-5, atol=1e-5)
    if isinstance(about, slice):
        out, same = attend_again(asked, slots, about, everything=True)
        wanted = attend(**exact, scaling=0.5, mask=causal(q, n + q, torch.device("cpu")))
        torch.testing.assert_close(out, wanted.to(dtype), **tolerance)
        assert torch.equal(same, total)
    again = looked_at(slots, about, q)[1].keys
    share = (scores - scores.logsumexp(-1, keepdim=True)).exp().amax((2, 3))[..., :n][..., about]
    found = largest_share(asked, again, total)
    torch.testing.assert_close(found.double(), share, rtol=2e-2 if tolerance else 1e-4, atol=1e-5)


def test_large_scores_neither_overflow_nor_vanish():
    """The shares of a part are right although a score before it is about 200 higher, for which exp
    overflows in float32."""
    asked, slots = made(torch.float32)
    queries = torch.zeros_like(asked.queries)
    queries[..., 0] = 1.0
    generator = torch.Generator().manual_seed(0)
    slots.keys[..., 0] = torch.randn(slots.keys.shape[:3], generator=generator)
    slots.keys[:, :, 5, 0] = 400.0
    asked = Observed(queries, 0.5)
    _, total = attend_again(asked, slots, slice(10, 20), everything=True)
    found = largest_share(asked, slots.keys[:, :, 10:20], total)
    assert total.max() < 10
    assert (found > 1e-4).all()
    assert (found < 1).all()


def test_blocks_do_not_show(monkeypatch):
    from kvsketch import reread as again

    asked, slots = made(torch.float64, q=50)
    _, total = attend_again(asked, slots, slice(0, 30), everything=False)
    whole = largest_share(asked, slots.keys[:, :, :30], total)
    monkeypatch.setattr(again, "_FEW_SCORES", 1)
    monkeypatch.setattr(again, "_FEW_QUERIES", 7)
    torch.testing.assert_close(largest_share(asked, slots.keys[:, :, :30], total), whole)


def test_what_it_cannot_do_does_not_fit():
    from dataclasses import replace

    asked, slots = made()
    assert not fits(replace(asked, softcap=5.0), slots)
    assert not fits(replace(asked, sinks=torch.zeros(4)), slots)
    assert not fits(replace(asked, slopes=torch.zeros(4)), slots)
    assert not fits(replace(asked, live=torch.ones(2, 7, dtype=torch.bool)), slots)
    assert not fits(asked, replace(slots, mass=torch.ones(2, 2, 37, dtype=torch.float64)))
