"""What every compressor guarantees, also on padded and degenerate input."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import METHODS, InputError, Observed, Slots
from kvsketch.farthest_first import farthest_first
from kvsketch.methods import Compressor, make
from kvsketch.methods.requirements import FORMER
from kvsketch.methods.uniform import inclusion_probabilities
from kvsketch.methods.window import split

BATCH, HEADS, DIM = 2, 2, 4


def random_slots(seed, n, dim=DIM, padding=0):
    g = torch.Generator().manual_seed(seed)
    slots = Slots(
        torch.randn(BATCH, HEADS, n, dim, generator=g),
        torch.randn(BATCH, HEADS, n, dim, generator=g),
    )
    if padding:
        live = torch.ones(BATCH, 1, n, dtype=torch.bool)
        live[0, :, :padding] = False
        slots = slots.only(live)
    return slots


def alive(slots):
    """``slots.live()`` as a tensor, also where it is None because all slots are live."""
    live = slots.live()
    return torch.ones(slots.keys.shape[:3], dtype=torch.bool) if live is None else live


def observed(seed, q):
    g = torch.Generator().manual_seed(seed)
    return Observed(torch.randn(BATCH, 2 * HEADS, q, DIM, generator=g), DIM**-0.5)


def run(method, slots, budget, seed=0, **window):
    return make(method, seed)(slots, budget, observed(1, slots.count), **window)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 40),
    budget=st.integers(1, 45),
    sink=st.integers(0, 5),
    recent=st.integers(0, 8),
    padding=st.integers(0, 6),
)
def test_every_method_keeps_the_budget_and_its_windows(
    method, seed, n, budget, sink, recent, padding
):
    slots = random_slots(seed, n, padding=min(padding, n - 1))
    out = run(method, slots, budget, sink=sink, recent=recent)
    assert out.count == min(n, budget)
    if out.count == n:
        assert out is slots
        return
    kept_sink = min(sink, budget)
    kept_recent = min(recent, budget - kept_sink)
    # row 1 has no padding: its sinks and recent tokens are kept unchanged
    for part, original in (
        (out.narrow(0, kept_sink), slots.narrow(0, kept_sink)),
        (
            out.narrow(budget - kept_recent, kept_recent),
            slots.narrow(n - kept_recent, kept_recent),
        ),
    ):
        if method == "d2o":  # D2O merges into all kept tokens, also into these
            continue
        assert torch.equal(part.keys[1], original.keys[1])
        assert torch.equal(part.values[1], original.values[1])
    # the padded row keeps as many real tokens as fit
    if padding and n > 1:
        live = alive(out)
        real = n - min(padding, n - 1)
        assert bool((live[0].sum(-1) == min(real, budget)).all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("decoding", [False, True])
def test_methods_that_keep_tokens_say_so(method, decoding):
    """Their slots are tokens as they were, of mass 1: a budget in few bits need not pay for masses.
    Of all others some slot is none."""
    made, slots = make(method), random_slots(0, 60)
    for budget in (16, torch.tensor([[16, 20], [31, 12]])):
        out = made.compress(slots, budget, observed(1, slots.count), decoding=decoding)
        live = alive(out)
        same = (out.keys.unsqueeze(3) == slots.keys.unsqueeze(2)).all(-1)
        same &= (out.values.unsqueeze(3) == slots.values.unsqueeze(2)).all(-1)
        same = same.any(-1) & (out.masses() == 1)
        assert bool(same[live].all()) or not made.keeps_tokens
        if method not in ("cam", "d2o", "kcenter"):  # which may have nothing to merge here
            assert bool(same[live].all()) is made.keeps_tokens


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_bytes(method):
    slots = random_slots(0, 50)
    first, second = (run(method, slots, 20, seed=7) for _ in range(2))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name])


def test_deepcopy_continues_the_random_stream():
    compressor = make("uniform", 3)
    twin = copy.deepcopy(compressor)
    slots = random_slots(0, 30)
    assert torch.equal(compressor(slots, 9).keys, twin(slots, 9).keys)


def test_uniform_is_unbiased_and_uniform_over_tokens():
    """After compressing twice (60 -> 30 -> 12) every token survives equally often (chi-square test
    at significance 1e-3 over 4,000 draws), and the total mass stays the number of tokens."""
    draws, n, kept = 1000, 60, 12
    index = torch.arange(n, dtype=torch.float32).expand(BATCH * draws, HEADS, n).unsqueeze(-1)
    slots = Slots(index, torch.ones_like(index))
    compressor = make("uniform", 11)
    out = compressor(compressor(slots, 30), kept)
    torch.testing.assert_close(out.mass.sum(-1), torch.full((BATCH * draws, HEADS), float(n)))
    torch.testing.assert_close(out.values[..., 0], out.mass)  # u and m share the weight
    counts = torch.bincount(out.keys.long().flatten(), minlength=n).double()
    expected = BATCH * draws * HEADS * kept / n
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Sampling without replacement only lowers the variance. 99.9% quantile, 59 degrees: 98.3.
    assert statistic < 98.3, statistic


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30), budget=st.integers(1, 30))
def test_inclusion_probabilities_sum_to_the_budget(sizes, budget):
    size = torch.tensor(sizes, dtype=torch.float64)[None, None]
    size = torch.where(size < 1e-3, 0.0, size)
    chance = inclusion_probabilities(size, budget)
    positive = int((size > 0).sum())
    assert bool((chance >= 0).all())
    assert bool((chance <= 1).all())
    assert float(chance.sum()) == pytest.approx(min(budget, positive))
    inside = (chance > 0) & (chance < 1)
    if int(inside.sum()) > 1:  # proportional where not capped
        ratio = (chance / size)[inside]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_streaming_llm_keeps_the_ends():
    slots = random_slots(0, 20)
    out = run("streaming_llm", slots, 8, sink=2, recent=3)
    expected = torch.cat([slots.keys[:, :, :2], slots.keys[:, :, -6:]], dim=2)
    assert torch.equal(out.keys, expected)


def test_h2o_keeps_what_was_attended_most():
    slots = random_slots(0, 20)
    seen = observed(1, 20)
    queries = seen.queries.unflatten(1, (HEADS, 2))
    scores = torch.einsum("bhgqd,bhsd->bhgqs", queries, slots.keys) * seen.scaling
    hidden = torch.ones(20, 20).triu(1).bool()
    mass = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).sum((2, 3))
    mass[..., :2] = mass[..., -3:] = torch.inf
    index = mass.topk(9, -1).indices.sort(-1).values
    out = run("h2o", slots, 9, sink=2, recent=3)
    assert torch.equal(out.keys, slots.take(index).keys)


def test_h2o_without_queries_is_refused():
    with pytest.raises(InputError, match="queries"):
        make("h2o")(random_slots(0, 9), 4)


def reference_k_center(keys, budget):
    """Greedy k-center, one token at a time, in plain Python."""
    chosen = [0]
    while len(chosen) < budget:
        distance = torch.cdist(keys, keys[chosen]).amin(-1)
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
    return chosen


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(2, 25), data=st.data())
def test_kcenter_is_the_greedy_traversal(seed, n, data):
    budget = data.draw(st.integers(1, n))
    keys = random_slots(seed, n).keys.double()
    inserted = farthest_first(keys, None, budget)
    for b in range(BATCH):
        for h in range(HEADS):
            chosen = reference_k_center(keys[b, h], budget)
            assert sorted(chosen) == inserted[b, h].nonzero().flatten().tolist()
            # insertion distances decrease along the traversal
            along = inserted[b, h, chosen]
            assert bool((along.diff() <= 1e-9).all())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(3, 14), data=st.data())
def test_kcenter_radius_is_at_most_twice_the_best(seed, n, data):
    """The greedy guarantee (Dyer and Frieze) holds; brute force over all sets of centers finds the
    best radius."""
    from itertools import combinations

    budget = data.draw(st.integers(1, min(4, n - 1)))
    keys = random_slots(seed, n, dim=2).keys[0, 0].double()
    distance = torch.cdist(keys, keys)
    best = min(float(distance[:, list(c)].amin(-1).max()) for c in combinations(range(n), budget))
    chosen = farthest_first(keys[None, None], None, budget)[0, 0].nonzero().flatten()
    assert float(distance[:, chosen].amin(-1).max()) <= 2 * best + 1e-9


def test_kcenter_takes_few_fresh_tokens_in_without_a_new_traversal():
    """After few fresh tokens were added without a new traversal, the covering radius is at most
    twice that of a new traversal."""
    slots = random_slots(5, 200)
    compressor = make("kcenter")
    kept = compressor(slots, 100)
    fresh = random_slots(6, 10)
    both = Slots.cat([kept, fresh])
    out = compressor(both, 100)
    anew = compressor(Slots(both.keys, both.values), 100)

    def radius(centers):
        return torch.cdist(both.keys, centers.keys).amin(-1).amax(-1)

    assert out.count == 100
    assert bool((radius(out) <= 2 * radius(anew) + 1e-6).all())


@pytest.mark.parametrize("method", METHODS)
def test_identical_tokens_and_one_token(method):
    same = Slots(torch.ones(BATCH, HEADS, 12, DIM), torch.ones(BATCH, HEADS, 12, DIM))
    out = run(method, same, 5, sink=1, recent=1)
    assert out.count == 5
    assert bool(torch.isfinite(out.keys).all())
    one = random_slots(0, 1)
    assert run(method, one, 1) is one


def test_split_puts_every_live_slot_in_exactly_one_part():
    slots = random_slots(0, 12, padding=7)
    parts = split(slots, 2, 4)
    assert [p.count for p in parts] == [2, 6, 4]
    kept = torch.cat([p.keys[0, 0][alive(p)[0, 0]] for p in parts])
    assert torch.equal(kept, slots.keys[0, 0, 7:])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("field", ["keys", "values"])
def test_non_finite_input_is_refused(method, field):
    slots = random_slots(0, 9)
    getattr(slots, field)[0, 1, 3, 2] = float("nan")
    with pytest.raises(InputError, match=field):
        run(method, slots, 4)


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match="did you mean 'kcenter'"):
        make("k-center")
    with pytest.raises(InputError, match="sink=-1"):
        make("uniform")(random_slots(0, 9), 4, sink=-1)
    with pytest.raises(InputError, match=r"recent=2\.5"):
        make("uniform")(random_slots(0, 9), 4, recent=2.5)
    with pytest.raises(InputError, match="budget=0"):
        make("uniform")(random_slots(0, 9), 0)


def test_a_method_that_fitted_to_queries_is_refused():
    """``reduce`` would get a bool where it expects queries."""
    with pytest.raises(InputError, match=r"Old\.fits is no attribute any more: reduce gets no"):
        type("Old", (Compressor,), {"fits": True})


@pytest.mark.parametrize("name", FORMER)
def test_attributes_that_became_requirements_are_refused_by_name(name):
    with pytest.raises(InputError, match=f"Old.{name} is no attribute any more: requires = "):
        type("Old", (Compressor,), {name: True})
