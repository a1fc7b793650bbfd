"""ChunkKV and LagKV equal their rules, computed for one head and one token at a time in float64.

tests/benchmarks/test_peers.py checks that they keep the tokens that kvpress keeps."""

from __future__ import annotations

import pytest
import torch
from drawn import check_stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import InputError, Observed, Slots
from kvsketch.cache import windowed
from kvsketch.methods import make
from kvsketch.methods.chunkkv import ChunkKV
from kvsketch.methods.lagkv import LagKV

BATCH, HEADS, DIM = 2, 2, 5


def case(seed, n, padding=0, dead=0.0, weighted=False):
    g = torch.Generator().manual_seed(seed)
    mass = 1 + torch.randint(3, (BATCH, HEADS, n), generator=g).float() if weighted else None
    slots = Slots(
        torch.randn(BATCH, HEADS, n, DIM, generator=g),
        torch.randn(BATCH, HEADS, n, DIM + 1, generator=g),
        mass,
        torch.arange(n).float().expand(BATCH, HEADS, n),
    )
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    live &= torch.rand(BATCH, n, generator=g) >= dead
    live[:, -1] = True
    if not bool(live.all()):
        slots = slots.only(live[:, None])
    queries = 1.5 * torch.randn(BATCH, 2 * HEADS, n, DIM, generator=g)
    return slots, live, Observed(queries, 0.4, live=live)


def positions(kept, row, head, own):
    """The positions of a head's live slots."""
    live = kept.masses()[row, head, :own] > 0
    return kept.positions[row, head, :own][live].long().tolist()


def best_chunks(tokens, score, chunk, room):
    """Whole chunks in the order of their mean score, then the best tokens of the next chunk."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    parts.sort(key=lambda part: -sum(score[t] for t in part) / len(part))
    kept = []
    for part in parts:
        left = room - len(kept)
        kept += part if len(part) <= left else sorted(part, key=lambda t: -score[t])[:left]
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(3, 50),
    chunk=st.integers(1, 12),
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
    padding=st.integers(0, 9),
    by_head=st.booleans(),
    data=st.data(),
)
def test_chunkkv_is_its_definition(seed, n, chunk, sink, recent, padding, by_head, data):
    slots, live, observed = case(seed, n, min(padding, n - 1), weighted=seed % 2 == 1)
    sizes = st.integers(1, n - 1)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    if not by_head:
        budget[:] = budget[0, 0]
    compressor = ChunkKV(chunk=chunk, window=4, kernel_size=3)
    kept = compressor(
        slots, budget if by_head else int(budget[0, 0]), observed, sink=sink, recent=recent
    )
    scores = make("snapkv").__class__(window=4, kernel_size=3).observe(slots, observed).score
    shared = scores.double().mean(1)  # every head keeps the same chunks
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            own = int(budget[row, head])
            first = min(sink, own)
            last = min(recent, own - first)
            expected = set(tokens)
            if len(tokens) > own:
                between = tokens[first : len(tokens) - last]
                best = best_chunks(between, shared[row].tolist(), chunk, own - first - last)
                expected = {*tokens[:first], *tokens[len(tokens) - last :], *best}
            assert set(positions(kept, row, head, own)) == expected


def test_heads_that_hold_different_slots_go_by_their_own_scores():
    """Where heads have budgets of their own, slots at the same place are of different tokens. They
    then get their own scores, and not their mean over heads."""
    slots, _, observed = case(1, 40)
    plain = windowed("snapkv", 0, 4, options={"window": 4})
    chunks = windowed("chunkkv", 0, 4, options={"window": 4, "chunk": 5})
    late = Observed(observed.queries[:, :, -3:], 0.4)
    alike = chunks.observe(slots, observed).score
    assert torch.equal(alike[:, 0], alike[:, 1])
    uneven = chunks(slots, torch.tensor([[10, 20], [15, 15]]), observed)
    both = chunks.observe(uneven, late).score
    assert torch.equal(both[0], plain.observe(uneven, late).score[0])
    assert torch.equal(both[1, 0], both[1, 1])


def lag_scores(keys, values, lag):
    """The rank of every token within its part, or None if no whole part follows it."""
    n = len(keys)
    found = [None] * n
    for start in range(0, n - 2 * lag + 1, lag):
        total = torch.zeros(lag, dtype=torch.float64)
        for x in (keys.double(), values.double()):
            behind = x[start + lag : start + 2 * lag]
            low, high = behind.min(0).values, behind.max(0).values
            scaled = (x[start : start + lag] - low) / torch.where(high > low, high - low, torch.inf)
            total += scaled.std(-1).softmax(0)
        for i, token in enumerate(total.argsort().tolist()):
            found[start + token] = i
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(3, 60),
    lag=st.integers(2, 12),
    sink=st.integers(0, 4),
    recent=st.integers(0, 9),
    dead=st.sampled_from([0.0, 0.3]),
    by_head=st.booleans(),
    data=st.data(),
)
def test_lagkv_is_its_definition(seed, n, lag, sink, recent, dead, by_head, data):
    slots, live, _ = case(seed, n, min(5, n - 1) if dead else 0, dead, weighted=seed % 2 == 1)
    slots.keys[:, :, n // 2 :, 1] = 0.5  # this channel is constant from here on
    sizes = st.integers(1, n - 1)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    if not by_head:
        budget[:] = budget[0, 0]
    kept = LagKV(lag)(slots, budget if by_head else int(budget[0, 0]), sink=sink, recent=recent)
    assert kept.score is None
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            own = int(budget[row, head])
            first = min(sink, own)
            last = min(recent, own - first)
            expected = set(tokens)
            if len(tokens) > own:
                behind = tokens[sink:]
                means = slots.mean_values()
                rank = lag_scores(slots.keys[row, head, behind], means[row, head, behind], lag)
                of = {t: lag if r is None else r for t, r in zip(behind, rank, strict=True)}
                between = tokens[first : len(tokens) - last]
                best = sorted(between, key=lambda t: (-of.get(t, lag), -t))
                best = best[: own - first - last]
                expected = {*tokens[:first], *tokens[len(tokens) - last :], *best}
            assert set(positions(kept, row, head, own)) == expected


@pytest.mark.parametrize("dim", [1, 3])
def test_channels_that_do_not_vary_say_nothing(dim):
    keys = torch.ones(1, 1, 30, dim)
    keys[..., 4, 0] = 5.0
    kept = LagKV(10)(Slots(keys, keys), 15)
    assert kept.count == 15
    assert bool(torch.isfinite(kept.keys).all())


def test_another_methods_score_stays_with_its_slots():
    slots, _, observed = case(3, 30)
    scored = make("snapkv").observe(slots, observed)
    kept = LagKV(5)(scored, 12, sink=1, recent=2)
    plain = LagKV(5)(slots, 12, sink=1, recent=2)
    at = kept.positions.long()
    assert torch.equal(kept.positions, plain.positions)
    assert torch.equal(kept.keys, plain.keys)
    assert torch.equal(kept.score, scored.score.gather(-1, at))


@pytest.mark.parametrize("method", ["chunkkv", "lagkv"])
def test_a_stream_stays_within_its_budget(method):
    slots, _, observed = case(2, 50)
    options = {"chunk": 6, "window": 4} if method == "chunkkv" else {"lag": 6}
    check_stream(method, slots, observed, options)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: ChunkKV(chunk=0), "chunk=0"),
        (lambda: ChunkKV(window=0), "window=0"),
        (lambda: LagKV(lag=0), "lag=0"),
        (lambda: LagKV(lag=2.5), r"lag=2\.5"),
    ],
)
def test_bad_arguments_are_named(make_one, message):
    with pytest.raises(InputError, match=message):
        make_one()


def test_lagkv_names_what_is_wrong_with_a_window():
    with pytest.raises(InputError, match="sink=-1"):
        LagKV(5)(case(0, 9)[0], 4, sink=-1)
