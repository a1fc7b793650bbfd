"""In one call with a budget for each head, every head keeps what it would keep alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import METHODS, InputError, Observed, Slots
from kvsketch.methods import Compressor, keep_top, make
from kvsketch.methods.kcenter import KCenter

BATCH, HEADS, DIM, GROUP = 2, 3, 4, 2
# for rankings, keys and masses that are computed with products over a whole batch
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def case(seed, n, dead="none", weighted=False, alibi=False):
    """Slots with scores, which are 0 for some of the newest, and the newest queries. Dead slots
    are padding on the ``"left"`` of row 0, or ``"any"`` slots of all rows."""
    g = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, n)
    mass = 1 + 3 * torch.rand(shape, generator=g) if weighted else None
    slots = Slots(
        torch.randn(*shape, DIM, generator=g),
        torch.randn(*shape, DIM + 1, generator=g),
        mass,
        torch.arange(n).float().expand(shape) if alibi else None,
        torch.rand(shape, generator=g) * (torch.arange(n) < n - seed % 4 * n // 8),
    )
    q = min(n, 24)
    live = torch.ones(BATCH, n, dtype=torch.bool)
    if dead == "left":
        live[0, : int(torch.randint(n, (), generator=g))] = False
    if dead == "any":
        live = torch.rand(BATCH, n, generator=g) < 0.7
        live[:, -1] = True
    if dead != "none":
        slots = slots.only(live[:, None])
    queries = torch.randn(BATCH, HEADS * GROUP, q, DIM, generator=g)
    sinks = torch.randn(HEADS * GROUP, generator=g) if seed % 2 else None
    slopes = torch.rand(HEADS * GROUP, generator=g) if alibi else None
    live = live[:, n - q :] if dead != "none" else None
    return slots, Observed(queries, 0.5, None, slopes, live, sinks)


def alone(slots, row, head):
    """The live slots of one head."""
    live = slots.live()
    keep = slice(None) if live is None else live[row, head].nonzero().squeeze(1)
    return slots.map(lambda t: t[row : row + 1, head : head + 1][:, :, keep])


def asked_alone(observed, slots, row, head):
    """The queries of one head, or None if there are dead slots."""
    if slots.live() is not None:
        return None  # without the dead slots, queries would see other slots
    heads = slice(head * GROUP, (head + 1) * GROUP)
    per_head = (observed.slopes, observed.sinks)
    slopes, sinks = (None if t is None else t[heads] for t in per_head)
    return Observed(observed.queries[row : row + 1, heads], 0.5, None, slopes, None, sinks)


def at_place(method, seed, row, head):
    """A method that draws for a single head what it draws at that place of a batch."""
    from kvsketch.random_numbers import places

    twin = make(method, seed)
    place = places(torch.arange(BATCH), HEADS)[row, head].view(1, 1)
    return twin.at(place, twin.generator)


def assert_close(mine, theirs, exact):
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        if exact:
            assert torch.equal(tensor, theirs[name]), name
        else:
            torch.testing.assert_close(tensor, theirs[name], **TOLERANCE)


#: methods whose slots are sums, which are rounded differently in a batch
MERGING = ("heavy_merge", "cluster_merge", "kcenter", "d2o")
DRAWN = {
    "seed": st.integers(0, 9999),
    "n": st.integers(2, 70),
    "sink": st.integers(0, 4),
    "recent": st.integers(0, 6),
    "dead": st.sampled_from(["none", "none", "left", "any"]),
    "weighted": st.booleans(),
    "data": st.data(),
}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(**DRAWN)
def test_every_head_keeps_what_it_keeps_alone(method, seed, n, sink, recent, dead, weighted, data):
    slots, observed = case(seed, n, dead, weighted)
    if method == "heavy_merge":  # its fit amplifies rounding errors
        slots = slots.map(lambda t: t.double())
        observed = replace(observed, queries=observed.queries.double())
    window = {"sink": sink, "recent": recent}
    sizes = st.integers(1, n + 3)
    budget = torch.tensor([[data.draw(sizes) for _ in range(HEADS)] for _ in range(BATCH)])
    # scored once for all heads, since TOVA's scores of one head depend on the others
    scored = make(method, seed).observe(slots, observed)
    out = make(method, seed)(scored, budget, observed, scored=True, **window)
    assert out.count == min(n, int(budget.max()))
    live = out.live()
    live = torch.ones(out.keys.shape[:3], dtype=torch.bool) if live is None else live
    for row in range(BATCH):
        for head in range(HEADS):
            own = int(budget[row, head])
            mine = {k: t[row, head] for k, t in out.tensors().items()}
            whole = {k: t[row, head] for k, t in scored.tensors().items()}
            whole.setdefault("mass", torch.ones(n).to(whole["keys"]))
            mine.setdefault("mass", torch.ones(out.count).to(mine["keys"]))
            if own >= n:
                assert_close({k: t[:n] for k, t in mine.items() if k in whole}, whole, True)
                continue
            single = alone(scored, row, head)
            held = min(own, single.count)
            for name, tensor in mine.items():
                assert not tensor[held:].any(), f"{name} behind the head's own slots"
            assert bool(live[row, head, :held].all())
            if dead != "none" and held < single.count and method == "heavy_merge":
                continue  # alone, its fit is to other queries
            kept = single
            if held < single.count:
                seen = asked_alone(observed, scored, row, head)
                twin = at_place(method, seed, row, head)
                kept = twin(single, own, seen, scored=True, **window)
            theirs = {k: t[0, 0] for k, t in kept.tensors().items()}
            theirs.setdefault("mass", torch.ones(held).to(theirs["keys"]))
            if "score" in mine:
                theirs.setdefault("score", torch.zeros(held))
            exact = held == single.count or method not in MERGING
            assert_close({k: t[:held] for k, t in mine.items()}, theirs, exact)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(8, 60), data=st.data())
def test_what_others_may_keep_does_not_matter(method, seed, n, data):
    """A head keeps the same whatever the budgets of the others are, also if all are equal to its
    own."""
    slots, observed = case(seed, n, data.draw(st.sampled_from(["none", "left"])))
    own = data.draw(st.integers(1, n - 1))
    sizes = st.integers(1, n + 2)
    found = []
    for everywhere in (False, False, True):
        others = [data.draw(sizes) for _ in range(BATCH * HEADS)]
        budget = torch.tensor(others).view(BATCH, HEADS)
        budget = torch.full_like(budget, own) if everywhere else budget
        budget[1, 2] = own
        out = make(method, seed)(slots, budget, observed, sink=1, recent=2)
        found.append({k: t[1, 2, :own] for k, t in out.tensors().items()})
        found[-1].setdefault("mass", torch.ones(own))
    for other in found[1:]:
        assert_close(found[0], other, method not in MERGING)


@pytest.mark.parametrize("method", METHODS)
def test_one_budget_for_all_heads_is_that_number(method):
    slots, observed = case(3, 50)
    for own in (1, 7, 20, 49, 50, 60):
        budget = torch.full((BATCH, HEADS), own)
        window = {"sink": 2, "recent": 4}
        by_head, plain = (make(method, 5)(slots, b, observed, **window) for b in (budget, own))
        assert by_head.count == plain.count == min(own, 50)
        torch.testing.assert_close(by_head.keys, plain.keys, **TOLERANCE)
        torch.testing.assert_close(by_head.values, plain.values, **TOLERANCE)
        torch.testing.assert_close(by_head.masses(), plain.masses(), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_keeps_everything_keeps_its_bits(method, dtype):
    slots, observed = case(4, 40, weighted=True)
    slots = replace(slots, keys=slots.keys.to(dtype), values=slots.values.to(dtype))
    budget = torch.tensor([[40, 9, 41], [3, 100, 20]])
    out = make(method, 1)(slots, budget, observed, sink=1, recent=3)
    for row, head in ((0, 0), (0, 2), (1, 1)):
        assert torch.equal(out.keys[row, head], slots.keys[row, head])
        assert torch.equal(out.values[row, head], slots.values[row, head])
        assert torch.equal(out.masses()[row, head], slots.masses()[row, head])
    assert out.keys.dtype == dtype
    everything = make(method)(slots, torch.full((BATCH, HEADS), 40), observed)
    assert everything is slots


def test_a_head_that_keeps_everything_costs_nothing(monkeypatch):
    """Heads that keep everything are not reduced, nor is one whose budget is within its windows."""
    seen = []
    reduce = KCenter.reduce

    def watched(self, slots, budget, queries):
        seen.append((slots.keys.shape, budget.tolist()))
        return reduce(self, slots, budget, queries)

    monkeypatch.setattr(KCenter, "reduce", watched)
    slots, _ = case(4, 40)
    make("kcenter")(slots, torch.tensor([[40, 9, 41], [3, 100, 20]]), sink=1, recent=3)
    assert seen == [(torch.Size([2, 1, 36, DIM]), [[5], [16]])]


def test_the_share_of_fresh_slots_is_that_of_live_ones():
    """If 8 of 24 live slots are fresh, more than a quarter, the traversal is done anew, although
    they are only a fifth of all 40."""
    slots, _ = case(0, 40)
    live = torch.ones(BATCH, 1, 40, dtype=torch.bool)
    live[0, :, 4:20] = False
    score = 100 - torch.arange(40.0) * (torch.arange(40) < 32)
    score = torch.where(torch.arange(40) < 32, score, 0.0).expand(BATCH, HEADS, 40)
    slots = replace(slots, score=score.clone()).only(live)
    out = make("kcenter")(slots, torch.full((BATCH, HEADS), 12))
    for head in range(HEADS):
        single = make("kcenter")(alone(slots, 0, head), 12)
        assert torch.equal(out.keys[0, head], single.keys[0, 0])
        kept = make("kcenter")(alone(slots, 1, head), 12)
        assert torch.equal(out.keys[1, head], kept.keys[0, 0])


class Far(Compressor):
    """A user's method that takes one budget at a time."""

    name, paper = "far", "none"
    calls: list

    def reduce(self, slots, budget, asked_again):
        assert isinstance(budget, int)
        self.calls.append((budget, asked_again))
        return keep_top(slots, slots.keys.norm(dim=-1), budget)


@pytest.mark.parametrize("again", [False, True])
def test_a_method_for_one_budget_is_called_once_for_each(again):
    slots, observed = case(7, 30)
    observed = replace(observed, after=again)
    budget = torch.tensor([[5, 9, 5], [9, 5, 30]])
    method = Far()
    method.calls = []
    out = method(slots, budget, observed)
    assert sorted(method.calls) == [(5, again), (9, again)]
    for row in range(BATCH):
        for head in range(HEADS):
            own = int(budget[row, head])
            if own == 30:
                continue
            single = alone(slots, row, head)
            seen = asked_alone(observed, slots, row, head)
            assert torch.equal(out.keys[row, head, :own], method(single, own, seen).keys[0, 0])


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (torch.ones(BATCH, HEADS), "float32"),
        (torch.ones(HEADS, dtype=torch.int64), r"must be int64 \(2, 3\)"),
        (torch.tensor([[3, 4, 0], [1, 1, 1]]), "budget=0"),
    ],
)
def test_bad_budgets_are_named(budget, message):
    with pytest.raises(InputError, match=message):
        make("knorm")(case(0, 9)[0], budget)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].requires.queries])
def test_scored_slots_are_not_scored_again(method, monkeypatch):
    slots, observed = case(6, 60)
    scored = make(method).observe(slots, observed)
    expected = make(method)(slots, 20, observed, sink=1, recent=4)
    monkeypatch.setattr(METHODS[method], "observe", None)
    out = make(method)(scored, 20, observed, sink=1, recent=4, scored=True)
    for name, tensor in expected.tensors().items():
        assert torch.equal(out.tensors()[name], tensor)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_held_between_calls_but_the_random_state(method):
    slots, observed = case(8, 60)
    compressor = make(method, 3)
    compressor.reset()
    before = {k: v for k, v in vars(compressor).items() if k != "generator"}
    compressor(slots, torch.tensor([[9, 60, 7], [30, 9, 1]]), observed, sink=1, recent=4)
    compressor(slots, 20, observed)
    assert bool(compressor.tensors()) == (method == "d2o")
    if compressor.tensors():  # what it keeps is among its tensors, and ``reset`` removes it
        compressor.reset()
    assert {k: v for k, v in vars(compressor).items() if k != "generator"} == before
