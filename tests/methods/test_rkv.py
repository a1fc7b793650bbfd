"""R-KV equals its definition, computed in float64 for one head and one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import InputError, Observed, Slots, estimator
from kvsketch.methods.rkv import RKV, redundancy

BATCH, HEADS, DIM = 2, 2, 5
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def case(seed, n, q, group=1, padding=0, gaps=False, softcap=None, dtype=torch.float32):
    """Slots with similar keys, and the queries of the newest q. Row 0 begins with dead slots; with
    ``gaps`` some between are dead, too."""
    g = torch.Generator().manual_seed(seed)
    mean = 0.7 * torch.randn(BATCH, HEADS, 1, DIM, generator=g)
    keys = (torch.randn(BATCH, HEADS, n, DIM, generator=g) + mean).to(dtype)
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    if gaps:
        live[:, :-1] &= torch.rand(BATCH, n - 1, generator=g) < 0.8
    values = torch.randn(BATCH, HEADS, n, 3, generator=g).to(dtype)
    slots = Slots(keys, values, positions=torch.arange(n).float().expand(BATCH, HEADS, n))
    if not bool(live.all()):
        slots = slots.only(live[:, None])
    queries = (2 * torch.randn(BATCH, group * HEADS, q, DIM, generator=g)).to(dtype)
    return slots, Observed(queries, 0.5, softcap, live=live[:, n - q :]), live


def redundant(keys, tokens, threshold):
    """Of every token (a number), how much it repeats others."""
    unit = {i: keys[i].double() / keys[i].double().norm() for i in tokens}
    mean = dict.fromkeys(tokens, 0.0)
    for i in tokens:
        cosine = {j: float(unit[i] @ unit[j]) if i != j else 0.0 for j in tokens}
        similar = [j for j in tokens if cosine[j] > threshold]
        cosine[max(similar, default=tokens[0])] = 0.0
        for j in tokens:
            mean[j] += cosine[j] / len(tokens)
    total = sum(math.exp(x) for x in mean.values())
    return {j: math.exp(x) / total for j, x in mean.items()}


def important(slots, observed, row, head, tokens, method, before=None):
    """Of every token, its importance."""
    n, q = slots.count, observed.queries.shape[2]
    group = observed.queries.shape[1] // HEADS
    older = tokens[: max(0, len(tokens) - method.window)]
    asked = [i for i in range(q) if bool(observed.live[row, i])]
    enough = len(asked) >= method.window
    asked = asked[-method.window :]
    keep = 1 - 1 / method.window
    weight = [1.0 if enough else keep ** (len(asked) - 1 - at) for at in range(len(asked))]
    found = [0.0] * n
    for i, share in zip(asked, weight, strict=True):
        logits = {}
        for j in (j for j in older if j <= n - q + i):
            mine = observed.queries[row, head * group : (head + 1) * group, i].double()
            each = mine @ slots.keys[row, head, j].double() * observed.scaling
            if observed.softcap is not None:
                each = observed.softcap * torch.tanh(each / observed.softcap)
            logits[j] = float(each.max())
        top = max(logits.values(), default=0.0)
        total = sum(math.exp(x - top) for x in logits.values())
        for j, x in logits.items():
            found[j] += share * math.exp(x - top) / total / sum(weight)
    half = method.kernel_size // 2
    pooled = [max(found[max(0, j - half) : j + half + 1]) for j in range(n)]
    fade = 0.0 if enough else keep ** len(asked)
    score = [0.0] * n
    for j in range(n):
        new = pooled[j] if j in older or not bool(slots.masses()[row, head, j]) else 0.0
        old = 0.0 if before is None else float(before[row, head, j])
        score[j] = old * fade + new * (1 - fade) if old > 0 else new
    return score


CASES = {
    "seed": st.integers(0, 999),
    "n": st.integers(2, 26),
    "group": st.integers(1, 3),
    "padding": st.integers(0, 5),
    "gaps": st.booleans(),
    "window": st.integers(1, 9),
    "kernel": st.sampled_from([1, 3, 7]),
}


@settings(max_examples=60, deadline=None)
@given(softcap=st.sampled_from([None, 1.5]), known=st.booleans(), data=st.data(), **CASES)
def test_importance_is_its_definition(
    seed, n, group, padding, gaps, window, kernel, softcap, known, data
):
    q = data.draw(st.integers(1, n))
    slots, observed, live = case(seed, n, q, group, min(padding, n - 1), gaps, softcap)
    before = None
    if known:  # the newest have none, nor those that were in the window so far
        g = torch.Generator().manual_seed(1)
        before = torch.rand(BATCH, HEADS, n, generator=g)
        before[..., n - min(q + window, n - 1) :] = 0.0
    method = RKV(window=window, kernel_size=kernel)
    found = method.observe(replace(slots, score=before), observed).score
    assert found.dtype == torch.float32
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            expected = important(slots, observed, row, head, tokens, method, before)
            newest = tokens[-window:]
            there = [j for j in tokens if j not in newest]
            actual = found[row, head, there].double()
            torch.testing.assert_close(
                actual, torch.tensor([expected[j] for j in there], dtype=torch.float64), **TOLERANCE
            )
            if not known:
                assert not bool(found[row, head, newest].any())


@settings(max_examples=60, deadline=None)
@given(threshold=st.sampled_from([0.0, 0.5, 0.8, 1.0]), **CASES)
def test_redundancy_is_its_definition(seed, n, group, padding, gaps, window, kernel, threshold):
    slots, _, live = case(seed, n, 1, group, min(padding, n - 1), gaps)
    found = redundancy(slots, threshold)
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        dead = (~live[row]).nonzero().flatten()
        for head in range(HEADS):
            assert not bool(found[row, head, dead].any())
            expected = redundant(slots.keys[row, head], tokens, threshold)
            actual = found[row, head, tokens].double()
            wanted = torch.tensor([expected[j] for j in tokens], dtype=torch.float64)
            torch.testing.assert_close(actual, wanted, **TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
    mix=st.sampled_from([0.0, 0.1, 0.6]),
    by_head=st.booleans(),
    data=st.data(),
    **CASES,
)
def test_kept_tokens_are_those_of_the_definition(
    seed, n, group, padding, gaps, window, kernel, sink, recent, mix, by_head, data
):
    """The window comes first, then what is important and not redundant among all slots."""
    slots, observed, live = case(seed, n, n, group, min(padding, n - 1), gaps)
    sizes = st.integers(1, n - 1)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    if not by_head:
        budget[:] = budget[0, 0]
    method = RKV(window, kernel, mix)
    asked = budget if by_head else int(budget[0, 0])
    kept = method.compress(slots, asked, observed, sink=sink, recent=recent)
    scores = method.observe(slots, observed).score
    assert kept.keys.shape[-1] == DIM
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            own = int(budget[row, head])
            here = kept.masses()[row, head, :own] > 0
            found = kept.positions[row, head, :own][here].long().tolist()
            if len(tokens) <= own:
                assert set(found) == set(tokens)
                continue
            start = min(sink, own)
            last = min(recent, own - start)
            middle = tokens[start : len(tokens) - last]
            repeats = redundant(slots.keys[row, head], tokens, 0.5)
            score = scores[row, head].tolist()
            newest = tokens[-window:]
            rank = {j: mix * score[j] - (1 - mix) * repeats[j] for j in middle}
            best = sorted(middle, key=lambda j: (j in newest, j if j in newest else rank[j]))
            chosen = best[len(best) - (own - start - last) :]
            assert set(found) >= {*tokens[:start], *tokens[len(tokens) - last :]}
            assert set(found) & set(newest) == (
                {*tokens[:start], *tokens[len(tokens) - last :], *chosen} & set(newest)
            )
            free = [j for j in found if j in middle and j not in newest]
            wanted = [j for j in chosen if j not in newest]
            assert len(free) == len(wanted)  # almost equal scores may be exchanged
            for one, other in zip(
                sorted(rank[j] for j in free), sorted(rank[j] for j in wanted), strict=True
            ):
                assert one == pytest.approx(other, abs=1e-5)


def test_of_equal_keys_the_newest_stays():
    """Every key three times, and attention that says nothing: the first and the second go. (Of two
    equal keys neither is redundant: each is the newest that is similar to the other.)"""
    g = torch.Generator().manual_seed(0)
    once = torch.linalg.qr(torch.randn(1, 1, 16, 16, generator=g))[0][:, :, :10]
    keys = torch.cat([once, once, once], dim=2)
    slots = Slots(keys, keys, positions=torch.arange(30).float().view(1, 1, -1))
    observed = Observed(torch.zeros(1, 1, 1, 16), 1.0)
    kept = RKV(window=1).compress(slots, 10, observed)
    assert kept.positions.flatten().tolist() == list(range(20, 30))
    mean = redundancy(slots, 0.5).log().view(3, 10)
    torch.testing.assert_close(mean[0] - mean[1], torch.full((10,), 1 / 30))
    torch.testing.assert_close(mean[1] - mean[2], torch.full((10,), 1 / 30))


def test_blocks_change_nothing(monkeypatch):
    slots, observed, _ = case(0, 40, 40, 2, 4, gaps=True)
    method = RKV(window=20)
    whole = method.observe(slots, observed)
    repeats = redundancy(slots, 0.5)
    monkeypatch.setattr(estimator, "_BLOCK_SCORES", 8 * 40 * 3)
    torch.testing.assert_close(method.observe(slots, observed).score, whole.score, **TOLERANCE)
    torch.testing.assert_close(redundancy(slots, 0.5), repeats, **TOLERANCE)


def test_keys_are_kept_bit_for_bit():
    slots, observed, _ = case(0, 40, 40, 2, dtype=torch.bfloat16)
    kept = RKV().compress(slots, 20, observed, sink=2, recent=3)
    assert kept.keys.dtype == torch.bfloat16
    at = kept.positions.long().unsqueeze(-1).expand(-1, -1, -1, DIM)
    assert torch.equal(kept.keys, slots.keys.gather(2, at))


def test_a_row_without_a_token_is_no_error():
    slots, observed, _ = case(0, 20, 20, 1, 20)
    kept = RKV().compress(slots, 9, observed)
    assert not bool(kept.masses()[0].any())
    assert bool(torch.isfinite(kept.score).all())


def test_queries_are_required():
    slots, observed, _ = case(0, 20, 20)
    with pytest.raises(InputError, match="rkv needs queries"):
        RKV().compress(slots, 9)
    with pytest.raises(InputError, match="multiple of num_key_value_heads"):
        RKV().compress(slots, 9, replace(observed, queries=torch.zeros(BATCH, 3, 20, DIM)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 1.5}, r"window=1\.5"),
        ({"kernel_size": 4}, "kernel_size=4 must be odd"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"mix": 1.1}, r"mix=1\.1"),
        ({"mix": True}, "mix=True"),
        ({"mix": float("nan")}, "mix=nan"),
        ({"threshold": -0.1}, r"threshold=-0\.1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        RKV(**arguments)
