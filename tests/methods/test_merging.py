"""Merging methods and measured allocation: what they preserve, what never gets worse, and unusual
input."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import build
from kvsketch import InputError, Observed, SketchCache, Slots, attend
from kvsketch.budget import Budget
from kvsketch.cache import Stream, windowed
from kvsketch.cache.curves import Curves
from kvsketch.hf.measuring import measure_curves, measure_schedule
from kvsketch.kernels import native
from kvsketch.methods import ClusterMerge, HeavyMerge, make
from kvsketch.methods.closest import _groups, _Rows, group_closest
from kvsketch.methods.groups import Groups, merge
from kvsketch.methods.heavy_merge import _decoded_attention, _in_turn
from kvsketch.methods.kmeans import group_keys
from kvsketch.methods.nearest import SlotBlocks
from kvsketch.methods.points import Given
from kvsketch.methods.scoring import recent_attention


def tokens(seed, n, heads=2, dim=4, batch=2):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, dim)
    return Slots(torch.randn(shape, generator=g), torch.randn(shape, generator=g))


def asked(seed, q, heads=4, dim=4, batch=2):
    g = torch.Generator().manual_seed(seed)
    return Observed(torch.randn(batch, heads, q, dim, generator=g), dim**-0.5)


def within(keys, groups):
    """The k-means objective of every row."""
    sums = groups.sum(keys)
    size = groups.sum(torch.ones_like(keys[..., :1])).clamp(min=1)
    centers = (sums / size).gather(1, groups.index.unsqueeze(-1).expand_as(keys))
    return (keys - centers).square().sum((1, 2))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(3, 80), share=st.floats(0.05, 0.95))
def test_lloyd_steps_lower_the_objective_and_use_every_row(seed, n, share):
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(3, n, 4, generator=g)
    count = max(1, min(n - 1, round(share * n)))
    one = torch.ones(3, n)
    few, many = (group_keys(keys, one, count, steps) for steps in (0, 5))
    assert int(many.index.min()) >= 0
    assert int(many.index.max()) < count
    assert bool((within(keys, many) <= within(keys, few) + 1e-4).all())


def test_long_inputs_are_grouped_in_blocks():
    keys = torch.randn(1, 9000, 4, generator=torch.Generator().manual_seed(0))
    groups = group_keys(keys, torch.ones(1, 9000), 901, 2)
    used = torch.bincount(groups.index[0], minlength=901)
    assert used.numel() == 901
    assert float((used > 0).double().mean()) > 0.9
    assert groups.index[0, :1000].max() < groups.index[0, 8000:].min()
    few = group_keys(keys, torch.ones(1, 9000), 2, 2)  # fewer groups than blocks
    assert sorted(few.index.unique().tolist()) == [0, 1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 60),
    budget=st.integers(1, 60),
    padding=st.integers(0, 9),
)
def test_cluster_merge_loses_no_value_and_no_mass(seed, n, budget, padding):
    """The sums of u and m stay those of the tokens, also after merging twice."""
    live = torch.ones(2, 1, n, dtype=torch.bool)
    live[0, :, : min(padding, n - 1)] = False
    slots = tokens(seed, n).only(live)
    once = ClusterMerge()(slots, budget)
    twice = ClusterMerge()(once, max(1, budget // 2))
    for out in (once, twice):
        torch.testing.assert_close(out.values.sum(2), slots.values.sum(2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.masses().sum(2), slots.masses().sum(2))
    assert once.count == min(n, budget)


def group_pairs(points, weight, count):
    """One round of ``group_closest`` on given points: the groups, and which rows have enough
    edges."""
    rows, n = weight.shape
    left = torch.as_tensor(count).expand(rows)
    given, columns = Given(points), torch.arange(n).expand(rows, n)
    whole = _Rows(given, given.places(columns), weight, torch.full_like(left, n), None)
    edges, found = whole.edges(left, torch.ones_like(left, dtype=torch.bool))
    return _groups(edges.number, left, found), found


def reference_pairs(points, weight, count):
    """``group_pairs`` of one row as a loop in float64: the set of groups of live slots, or None if
    there are too few pairs."""
    points, weight = points.double().tolist(), weight.double().tolist()
    live = [i for i, w in enumerate(weight) if w > 0]
    cost, partner = {}, {}
    for i in live:
        for j in live:
            if i != j:
                apart = sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True))
                price = weight[i] * weight[j] / (weight[i] + weight[j]) * apart
                if price < cost.get(i, float("inf")):
                    cost[i], partner[i] = price, j
    edges = [i for i in partner if (cost[partner[i]], partner[i]) < (cost[i], i)]
    edges.sort(key=lambda i: (cost[i], i))
    wanted = max(0, len(live) - count)
    if len(edges) < wanted:
        return None
    group = {i: {i} for i in live}
    for i in edges[:wanted]:
        together = group[i] | group[partner[i]]
        for member in together:
            group[member] = together
    return {frozenset(members) for members in group.values()}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 50),
    share=st.floats(0.0, 0.5),
    dead=st.integers(0, 5),
)
def test_pairs_equal_a_loop(seed, n, share, dead):
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(3, n, 4, generator=g, dtype=torch.float64)
    weight = torch.rand(3, n, generator=g, dtype=torch.float64) + 0.01
    weight[0, torch.randperm(n, generator=g)[: min(dead, n - 1)]] = 0.0
    count = min(n - 1, n - max(1, int(share * n)))
    expected = [reference_pairs(p, w, count) for p, w in zip(points, weight, strict=True)]
    grouped, found = group_pairs(points, weight, count)
    assert found.tolist() == [want is not None for want in expected]
    for row, (members, want) in enumerate(zip(grouped.index.tolist(), expected, strict=True)):
        if want is None:
            continue
        groups = {}
        for slot, number in enumerate(members):
            assert 0 <= number < count
            if weight[row, slot] > 0:
                groups.setdefault(number, set()).add(slot)
        assert {frozenset(x) for x in groups.values()} == want
        # dead slots are in groups of their own while there are groups to spare
        for slot, number in enumerate(members):
            if weight[row, slot] == 0 and len(groups) < count:
                assert number not in groups


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 50),
    kept=st.floats(0.05, 0.95),
    share=st.sampled_from([0.1, 0.25, 0.5]),
)
def test_rounds_equal_a_loop(seed, n, kept, share):
    """Merged slots enter the next round as their weighted mean, with the sum of their weights."""
    g = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, 1, n, 3, generator=g, dtype=torch.float64)
    mass = 0.5 + torch.rand(1, 1, n, generator=g, dtype=torch.float64)
    weight = torch.rand(1, n, generator=g, dtype=torch.float64) + 0.01
    count = max(1, min(n - 1, round(kept * n)))
    groups, found = group_closest(
        Slots(keys, values * mass.unsqueeze(-1), mass), weight, count, share
    )
    keys, values = (x[0, 0] - x[0, 0].mean(0) for x in (keys, values))
    first = torch.cat([keys, 0.5 * keys.norm() / values.norm() * values], dim=-1)
    members = [{i} for i in range(n)]
    while len(members) > count:
        points = torch.stack(
            [
                sum(weight[0, i] * first[i] for i in m) / sum(weight[0, i] for i in m)
                for m in members
            ]
        )
        heavy = torch.stack([sum(weight[0, i] for i in m) for m in members])
        left = max(count, len(members) - max(1, int(share * len(members))))
        merged = reference_pairs(points, heavy, left)
        assert bool(found) or merged is None or left > count
        if merged is None:
            assert not bool(found)
            return
        members = [set().union(*(members[i] for i in together)) for together in merged]
    assert bool(found)
    mine = {}
    for slot, number in enumerate(groups.index[0].tolist()):
        mine.setdefault(number, set()).add(slot)
    assert {frozenset(m) for m in mine.values()} == {frozenset(m) for m in members}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 700),
    data=st.data(),
    grouping=st.sampled_from(["pairs", "closest", "k-means"]),
)
def test_rows_with_a_count_of_their_own_are_grouped_as_alone(seed, n, data, grouping):
    """Rows that differ in size and in count are grouped as each would be alone, over several blocks
    and rounds, also where a row merges nothing."""
    g = torch.Generator().manual_seed(seed)
    rows = 4
    keys, values = torch.randn(2, 1, rows, n, 4, generator=g, dtype=torch.float64)
    weight = torch.rand(rows, n, generator=g, dtype=torch.float64) + 0.01
    sizes = torch.tensor([n, *(data.draw(st.integers(1, n)) for _ in range(rows - 1))])
    if grouping == "pairs":
        sizes[:] = n
    count = torch.tensor([data.draw(st.integers(1, int(size))) for size in sizes])
    if grouping == "pairs":
        count = torch.maximum(count, sizes - n // 4 - 1).clamp(min=1)
    weight = weight * (torch.arange(n) < sizes.unsqueeze(1))

    def grouped(keys, values, weight, count, sizes):
        if grouping == "pairs":
            return group_pairs(keys[0], weight, count)
        if grouping == "closest":
            return group_closest(Slots(keys, values), weight, count, 0.25, sizes=sizes)
        found = torch.ones(len(weight), dtype=torch.bool)
        return group_keys(keys[0], weight, count, 3, sizes), found

    groups, found = grouped(keys, values, weight, count, sizes)
    for row in range(rows):
        size, own = int(sizes[row]), int(count[row])
        part = slice(row, row + 1), slice(size)
        alone = (t[:, part[0], part[1]] for t in (keys, values))
        single, there = grouped(*alone, weight[part], own, None)
        assert bool(there) == bool(found[row])
        if there:
            mine = groups.index[row, :size]
            assert int(mine.max()) < own
            assert torch.equal(mine, single.index[0])


def test_a_group_of_one_is_what_it_was_and_others_stay_ahead():
    """A group of one slot is unchanged bit for bit, in bfloat16 and with a weight by which it would
    be rounded. Slots marked ``ahead`` come first, in each row as many as it has."""
    slots = tokens(0, 9)
    mass = 0.3 + torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(1))
    slots = Slots(slots.keys.bfloat16(), slots.values.bfloat16(), mass, score=mass.clone())
    ahead = torch.zeros(4, 9, dtype=torch.bool)
    ahead[:, 3] = True
    ahead[1, 5] = True
    others = torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8], [0, 1, 2, 4, 6, 7, 8, 0]])[[0, 1, 0, 0]]
    index = torch.tensor([[0, 1, 0, 2, 3, 4, 5, 6], [0, 1, 0, 2, 3, 4, 5, 0]])[[0, 1, 0, 0]]
    weight = torch.full((4, 8), 0.7)
    weight[1, 7] = 0.0
    out = merge(slots, Groups(index, 7), weight, True, others, ahead, width=8)
    expected = {0: [3, None, 1, 4, 5, 6, 7, 8], 1: [3, 5, None, 1, 4, 6, 7, 8]}
    for row, places in expected.items():
        for at, place in enumerate(places):
            for name, tensor in out.tensors().items():
                mine, old = tensor[0, row, at], slots.tensors()[name][0, row]
                if place is not None:
                    assert torch.equal(mine, old[place]), (row, at, name)
                elif name in ("mass", "score"):
                    torch.testing.assert_close(mine, old[0] + old[2])
                elif name == "keys":
                    torch.testing.assert_close(mine, (old[0] + old[2]) / 2, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_stream_says_what_was_decoded(bits, monkeypatch):
    said = []
    compress = HeavyMerge.compress

    def watched(self, *arguments, decoding=False, **options):
        said.append(decoding)
        return compress(self, *arguments, decoding=decoding, **options)

    monkeypatch.setattr(HeavyMerge, "compress", watched)
    driver = Stream(windowed("heavy_merge", 2, 6), Budget(40), 4, bits=bits)
    for start, count in [(0, 90), *((at, 1) for at in range(90, 130))]:
        driver.extend(tokens(start, count))
        driver.settle(asked(start, count), prefill=count > 1)
    assert len(said) > 3
    assert said == [False] + [True] * (len(said) - 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 700),
    kept=st.floats(0.01, 0.99),
    distinct=st.sampled_from([1, 3, 10**6]),
    dead=st.integers(0, 20),
)
def test_merging_pairs_keeps_count_mass_and_sums(seed, n, kept, distinct, dead):
    """The count, the mass and the sums of values are right, also for identical keys, rows with dead
    slots, several blocks and several rounds."""
    live = torch.ones(2, 1, n, dtype=torch.bool)
    live[0, :, : min(dead, n - 1)] = False
    slots = tokens(seed, n)
    slots = Slots(slots.keys[:, :, torch.arange(n) % distinct], slots.values).only(live)
    weight = torch.rand(4, n, generator=torch.Generator().manual_seed(seed)) + 1e-3
    weight = weight * live.expand(2, 2, n).reshape(4, n)
    count = min(n - 1, max(1, round(kept * n)))
    groups, found = group_closest(slots, weight, count, 0.25)
    if not bool(found.all()):  # too many costs are equal: the methods then take k-means
        assert distinct < 10**6
        return
    out = merge(slots, groups, weight)
    assert out.count == count
    torch.testing.assert_close(out.masses().sum(2), slots.masses().sum(2))
    torch.testing.assert_close(out.values.sum(2), slots.values.sum(2), atol=1e-3, rtol=1e-4)
    alive = out.live()
    expected = live.expand(2, 2, n).sum(-1).clamp(max=count)
    found = torch.full((2, 2), count) if alive is None else alive.sum(-1)
    assert torch.equal(found, expected)
    if alive is not None:  # dead slots at the end
        assert bool((alive.to(torch.int8).diff(dim=-1) <= 0).all())


def test_one_round_merges_only_the_closest():
    """When 100 slots are reduced to 95, as on a full page, at least 90 stay unchanged, bit for
    bit."""
    slots = tokens(7, 100, heads=1, batch=1)
    kept = ClusterMerge()(slots, 95)
    same = (kept.keys[0, 0].unsqueeze(1) == slots.keys[0, 0].unsqueeze(0)).all(-1).any(1)
    assert int(same.sum()) >= 90
    assert bool((kept.masses()[0, 0][same] == 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cluster_merge", "heavy_merge"])
def test_a_long_decode_stays_on_its_page(name):
    """Over 100,000 decoded tokens there are never more slots than budget + buffer, and the bytes
    stay constant after the first compression."""
    n, budget, buffer = 100_000, 64, 8
    g = torch.Generator().manual_seed(0)
    keys, values, queries = torch.randn(3, n, 4, generator=g).view(3, 1, 1, n, 4)
    sketch = Stream(windowed(name, 2, 6), Budget(budget), buffer)
    size = None
    with torch.inference_mode():
        for k, v, q in zip(*(x.split(1, dim=2) for x in (keys, values, queries)), strict=True):
            sketch.extend(Slots(k, v))
            sketch.settle(Observed(q, 0.5), prefill=False)
            assert sketch.held <= budget + buffer
            if sketch.compressed:
                held = sum(t.nbytes for t in sketch.tensors())
                waiting = sum(t.nbytes for t in sketch.scores.queries.tensors())
                size = held - waiting if size is None else size
                assert held - waiting == size
        if name == "cluster_merge":
            assert float(sketch.slots.masses().sum()) == pytest.approx(n, rel=1e-3)
    assert sketch.seen == n
    assert size is not None


def test_attention_of_decoded_queries_is_snapkvs():
    """The attention of a few queries is computed as that of many, whether they belong to the newest
    tokens or come after all slots."""
    g = torch.Generator().manual_seed(0)
    slots = tokens(3, 90)
    some = 3 * torch.rand(2, 2, 90, generator=g) + 0.1
    # with the last masses some queries see no live slot
    for mass in (None, some, some * (torch.arange(90) >= 40)):
        weighted = Slots(slots.keys, slots.values, mass)
        for q, after in itertools.product((1, 8, 63), (False, True)):
            observed = replace(asked(q, q), after=after)
            with native.switched(False):
                mine = _decoded_attention(weighted, observed, 64)
                torch.testing.assert_close(mine, recent_attention(weighted, observed, 64)[0])
            torch.testing.assert_close(mine, recent_attention(weighted, observed, 64)[0])


@pytest.mark.parametrize("compressor", [ClusterMerge(), HeavyMerge(share=0.0)])
def test_merging_equal_keys_is_exact(compressor):
    """Tokens with seven different keys are reduced to twelve slots, each of tokens with the same
    key, and queries that attend to all tokens get their exact answers."""
    g = torch.Generator().manual_seed(1)
    centers = 5 * torch.randn(1, 2, 7, 4, generator=g)
    slots = Slots(centers[:, :, torch.arange(70) % 7], torch.randn(1, 2, 70, 4, generator=g))
    queries = torch.randn(1, 2, 9, 4, generator=g)
    kept = compressor(slots, 12, Observed(queries, 0.5, after=True))
    assert kept.count == 12
    apart = (kept.keys.unsqueeze(3) - centers.unsqueeze(2)).norm(dim=-1).amin(-1)
    assert float(apart.max()) < 1e-4
    exact = attend(queries, slots, scaling=0.5)
    torch.testing.assert_close(attend(queries, kept, scaling=0.5), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["cluster_merge", "heavy_merge"])
def test_odd_input_has_defined_results(name):
    """Identical tokens, a single token, a budget of all tokens and clusters to which no query
    attends have defined results."""
    same = Slots(torch.ones(1, 2, 30, 4), torch.full((1, 2, 30, 4), 2.0))
    queries = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    observed = Observed(queries, 0.5)
    kept = make(name)(same, 7, observed)
    torch.testing.assert_close(
        attend(queries, kept, scaling=0.5), torch.full((1, 2, 5, 4), 2.0), atol=1e-4, rtol=1e-4
    )
    one = tokens(0, 1, batch=1)
    assert make(name)(one, 1, observed) is one
    assert make(name)(same, 30, observed) is same
    # a far-away cluster gets exactly 0 attention in float32
    far = tokens(2, 40, batch=1)
    keys = far.keys.clone()
    keys[:, :, :20] = 0.0
    keys[:, :, :20, 0] = -1000.0
    queries = torch.zeros(1, 2, 6, 4)
    queries[..., 0] = 10.0
    kept = make(name)(Slots(keys, far.values), 9, Observed(queries, 0.5))
    assert bool(torch.isfinite(attend(queries, kept, scaling=0.5)).all())
    torch.testing.assert_close(kept.masses().sum(-1), torch.full((1, 2), 40.0), rtol=0.2, atol=0)


def test_heavy_tokens_stay_exact():
    """Tokens that get most attention are kept unchanged, with mass 1."""
    slots = tokens(5, 60, batch=1)
    keys = slots.keys.clone()
    queries = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    heavy = [7, 23, 41]
    keys[:, :, heavy] = 6 * torch.nn.functional.normalize(queries.mean(2, keepdim=True), dim=-1)
    slots = Slots(keys, slots.values)
    kept = HeavyMerge(share=0.5)(slots, 12, Observed(queries, 1.0))
    for place in heavy:
        assert stays(slots, kept, place)


def stays(slots, kept, place):
    """Whether every head keeps the token at ``place`` unchanged."""
    found = (kept.values == slots.values[:, :, place : place + 1]).all(-1)
    return bool((found & (kept.masses() == 1)).any(-1).all())


def test_distinct_keys_stay_exact_without_attention():
    """Tokens with keys opposite to all others, to which no query attends, stay beside the most
    attended ones. With ``distinct=False`` they do not, and after a second reading ``distinct``
    changes nothing."""
    g = torch.Generator().manual_seed(2)
    keys = 0.1 * torch.randn(1, 2, 60, 4, generator=g)
    keys[..., 0] += 3.0
    # Three tokens of each kind, which would be merged with each other.
    distinct, attended = [20, 21, 22], [40, 41, 42]
    keys[:, :, distinct] = torch.tensor([-3.0, 0.1, 0.0, 0.0])
    keys[:, :, attended] = torch.tensor([9.0, 0.0, 0.0, 0.1])
    slots = Slots(keys, torch.randn(1, 2, 60, 4, generator=g))
    queries = torch.zeros(1, 4, 16, 4)
    queries[..., 0] = 4.0
    observed = Observed(queries, 1.0)

    def kept(observed=observed, **options):
        return HeavyMerge(share=0.75, **options)(slots, 8, observed)

    alone = kept(distinct=False)
    assert all(stays(slots, kept(), place) for place in distinct + attended)
    assert all(stays(slots, alone, place) for place in attended)
    assert not any(stays(slots, alone, place) for place in distinct)
    read = Observed(queries, 1.0, after=True)
    for name, tensor in kept(read).tensors().items():
        assert torch.equal(tensor, kept(read, distinct=False).tensors()[name]), name


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(1, 30))
def test_two_orders_in_turn(seed, n):
    """The result is the first of one order, the first of the other, the second of the one and so
    on, without repeats."""
    g = torch.Generator().manual_seed(seed)
    first, second = (torch.rand(3, n, generator=g).argsort(1) for _ in range(2))
    for row, other, found in zip(first, second, _in_turn(first, second), strict=True):
        both = torch.stack([row, other], dim=1).flatten().tolist()
        assert found.tolist() == list(dict.fromkeys(both))


def test_streaming_keeps_total_mass_through_many_compressions():
    model = build("llama")
    cache = SketchCache(model.config, "heavy_merge", budget=40, sink=2, recent=6)
    ids = torch.randint(3, 100, (2, 60), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=120, do_sample=False)
    assert out.shape == (2, 180)
    for layer in cache.layers:
        assert float(layer.stream.held.double().mean()) <= 41
        mass = layer.stream.slots.masses().sum(-1)
        torch.testing.assert_close(mass, torch.full_like(mass, 179.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"share": 1.0}, r"share=1\.0"),
        ({"share": -0.1}, r"share=-0\.1"),
        ({"window": 0}, "window=0"),
        ({"steps": 0}, "steps=0"),
        ({"pairs": 0.6}, r"pairs=0\.6"),
        ({"pairs": -0.1}, r"pairs=-0\.1"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(InputError, match=named):
        HeavyMerge(**arguments)


# --- allocation ----------------------------------------------------------------------------------

KEPT = torch.tensor([0.05, 0.1, 0.25, 0.5, 1.0], dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), budget=st.floats(0.06, 1.0))
def test_allocation_spends_the_budget_and_beats_the_same_everywhere(seed, budget):
    """For convex falling curves the error of the allocation is at most that of the highest measured
    level within the budget, the same in all heads, and the mean share is 1."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.rand(3, 4, 1, generator=g, dtype=torch.float64) ** 3
    rate = 1 + 9 * torch.rand(3, 4, 1, generator=g, dtype=torch.float64)
    error = scale * (torch.exp(-rate * KEPT) - torch.exp(-rate))
    curves = Curves(error, KEPT)
    shares = torch.tensor(curves.allocate(budget), dtype=torch.float64)
    assert float(shares.mean()) == pytest.approx(1.0, rel=1e-6)
    slots = shares * budget
    assert float(slots.max()) <= 1 + 1e-9
    assert float(slots.min()) >= 0.05 - 1e-9

    def at(kept):
        return float(
            (scale[..., 0] * (torch.exp(-rate[..., 0] * kept) - torch.exp(-rate[..., 0]))).sum()
        )

    level = float(KEPT[budget + 1e-12 >= KEPT].max())
    assert at(slots) <= at(torch.full((3, 4), level, dtype=torch.float64)) + 1e-9


def test_a_head_that_needs_everything_gets_it():
    """One head whose error only falls at the last level (a retrieval head) gets all its tokens."""
    error = torch.zeros(2, 2, 5, dtype=torch.float64)
    error[0, 1] = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    error[1, 0] = torch.tensor([0.01, 0.005, 0.002, 0.001, 0.0])
    shares = Curves(error, KEPT).allocate(0.4)
    assert shares[0][1] * 0.4 == pytest.approx(1.0)
    assert min(shares[0][0], shares[1][0], shares[1][1]) * 0.4 >= 0.05


def test_budget_below_the_lowest_level_is_named():
    error = torch.rand(1, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves = Curves(error.sort(-1, descending=True).values, KEPT)
    with pytest.raises(InputError, match=r"budget=0\.01"):
        curves.allocate(0.01)


def test_measured_schedule_goes_into_a_cache():
    """Curves measured with a model fall to 0. A cache takes their schedule, keeps as many slots as
    without it, and gives heads different shares."""
    model = build("llama")
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 100, (1, 160), generator=g) for _ in range(2)]
    window = {"sink": 2, "recent": 6}
    curves = measure_curves(model, prompts, "heavy_merge", follow=16, **window)
    assert float(curves.error[..., -1].max()) < 1e-9
    assert bool((curves.error[..., 0] > 0).all())
    schedule = measure_schedule(model, prompts, "heavy_merge", 0.4, follow=16, **window)
    sizes = {}
    for name, chosen in (("same", None), ("measured", schedule)):
        cache = SketchCache(
            model.config, "heavy_merge", budget=0.4, allocation=chosen, bits=16, **window
        )
        with torch.no_grad():
            model(prompts[0], past_key_values=cache, use_cache=True)
        sizes[name] = cache.summary()["slots"]
    assert sizes["measured"] == pytest.approx(sizes["same"], rel=0.02)
    assert len({x for row in schedule for x in row}) > 1
    with pytest.raises(InputError, match="too short"):
        measure_schedule(model, [prompts[0][:, :20]], "heavy_merge", 0.4, follow=16)
    with pytest.raises(InputError, match="prompts is empty"):
        measure_schedule(model, [], "heavy_merge", 0.4)


def test_groups_sum_by_group():
    groups = Groups(torch.tensor([[0, 2, 0]]), 3)
    values = torch.tensor([[[1.0], [2.0], [4.0]]])
    assert groups.sum(values).flatten().tolist() == [5.0, 0.0, 2.0]


# --- benchmarks ----------------------------------------------------------------------------------


def run_benchmark(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stderr if done.returncode else done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_ablation_rows_are_the_attention_errors_of_one_part_changed(tmp_path):
    out = tmp_path / "ablation.json"
    parts = "heavy_merge@even;no distinct keys;streamed, chunks of 64: heavy_merge@even"
    arguments = (
        "--models",
        "longeval-one-head",
        "--parts",
        parts,
        "--json",
        "--out",
        out,
        "--prompts",
        "1",
    )
    code, line = run_benchmark("benchmarks.ablation", *map(str, arguments))
    assert code == 0, line
    result = json.loads(line)
    assert json.loads(out.read_text()) == result
    errors = {(r["part"], r["kept"]): r["relative_error"] for r in result["results"]}
    assert len(errors) == 3 * 4
    for part in parts.split(";"):
        assert errors[part, 0.5] < errors[part, 0.0625] < 0.5
    assert run_benchmark("benchmarks.ablation", "--parts", "hevy_merge")[0] != 0


@pytest.mark.slow
def test_compression_time_is_a_share_of_a_prefill():
    small = ("--tokens", "512", "--threads", "1", "--repeats", "1", "--methods", "heavy_merge@even")
    code, line = run_benchmark("benchmarks.compression_time", *small, "--json")
    assert code == 0, line
    result = json.loads(line)
    assert {r["kept"] for r in result["results"]} == {0.25, 0.125}
    for row in result["results"]:
        found = row["seconds"] / result["prefill_seconds"]
        assert found == pytest.approx(row["share_of_prefill"], rel=0.1, abs=0.01)
    code, message = run_benchmark("benchmarks.compression_time", "--methods", "hevy_merge")
    assert code != 0
    assert "hevy_merge" in message


@settings(max_examples=200)
@given(
    sizes=st.lists(
        st.one_of(st.integers(1, 400), st.integers(15_000, 60_000)), min_size=1, max_size=4
    ),
    spare=st.integers(0, 3),
)
def test_every_slot_is_in_one_block(sizes, spare):
    """Every slot of a row is in exactly one block, also in rows so long that as many blocks of the
    rounded-up size would end behind them."""
    rows, width = torch.arange(len(sizes)), max(sizes) + spare
    blocks = SlotBlocks.of(rows, torch.tensor(sizes), width)
    assert int(blocks.column.max()) < len(sizes) * width
    assert bool(blocks.real.any(1).all())  # no empty block
    found = blocks.column[blocks.real].sort().values
    wanted = torch.cat([torch.arange(n) + row * width for row, n in enumerate(sizes)])
    assert torch.equal(found, wanted)
    assert torch.equal(blocks.row * width, blocks.column[:, 0] - blocks.first[:, 0])
