"""For every method, what a row of a batch keeps does not depend on the other rows.

A row has its own tokens, queries and padding; the other rows, and how many there are, change. Only
live slots are compared: the number of dead ones depends on the fullest row.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy import stats

from families import EVERY_METHOD, VOCABULARY, build
from kvsketch import Observed, SketchCache, Slots
from kvsketch.budget import Budget
from kvsketch.cache import Stream, windowed
from kvsketch.methods import HALVINGS, METHODS, make
from kvsketch.methods.registry import ALL_METHODS, REREADING, SKETCHES
from kvsketch.methods.rotation import Turn
from kvsketch.methods.sketches import (
    BalanceKVStreaming,
    MergeReduce,
    OneDimensional,
    SlidingWindowSampled,
    SubGen,
    SubGenCoupled,
)
from kvsketch.methods.sketches.online_clusters import assign
from kvsketch.random_numbers import derived, drawn, places, streams, uniform

HEADS, QUERY_HEADS, DIM = 2, 4, 6
SIGNIFICANCE = 1e-3
KINDS = ("spread", "clustered", "large")
#: Batches of rows by their kind: each kind of ``KINDS`` is at the first place of three, and at the
#: second of three, beside others and a row whose tokens are all equal.
BATCHES = (
    *((kind,) for kind in KINDS),
    *(("clustered", "spread"), ("large", "clustered"), ("spread", "large")),
    *(("large", "spread", "clustered"), ("spread", "clustered", "equal")),
    ("clustered", "large", "equal"),
    *(("equal", kind) for kind in KINDS),
)

#: methods without a second reading; those with one are tested in tests/hf/test_reading.py
BY_PROMPT = sorted(set(ALL_METHODS) - set(REREADING))


def row(kind, seed, n, dim=DIM):
    """One row's keys, values and queries."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, HEADS, n, dim, generator=g)
    values = torch.randn(1, HEADS, n, 3, generator=g)
    queries = torch.randn(1, QUERY_HEADS, n, dim, generator=g)
    if kind == "clustered":
        centers = 4 * torch.randn(1, HEADS, 3, dim, generator=g)
        keys = centers[:, :, torch.randint(3, (n,), generator=g)] + 0.01 * keys
    elif kind == "large":  # values over three orders of magnitude
        keys, values = 20 * keys, values * 1000.0 ** torch.rand(1, HEADS, n, 1, generator=g)
    elif kind == "equal":  # all tokens are equal, so that every comparison is a tie
        keys, values = keys[:, :, :1].expand_as(keys), values[:, :, :1].expand_as(values)
    return keys, values, queries


def batch(rows):
    keys, values, queries = (torch.cat(parts).contiguous() for parts in zip(*rows, strict=True))
    return Slots(keys, values), queries


def check_batches(n, dim, made, assert_same):
    """Check that a row is the same in all ``BATCHES`` that have it at the same place. ``made(rows,
    kinds)`` is called for each; ``assert_same(one, other, place)`` compares what it returned."""
    rows = {kind: row(kind, 1 + i, n, dim) for i, kind in enumerate((*KINDS, "equal"))}
    first = {}
    for kinds in BATCHES:
        found = made([rows[kind] for kind in kinds], kinds)
        for place, kind in enumerate(kinds):
            if kind != "equal":
                assert_same(first.setdefault((kind, place), found), found, place)


def batches(n, dim=DIM):
    """The place of a row, and batches that all have this row there."""
    own = row("spread", 1, n, dim)
    spread, clustered, large, equal = (
        row(other, 7 + i, n, dim) for i, other in enumerate((*KINDS, "equal"))
    )
    yield 0, [[own], [own, spread], [own, equal], [own, large, clustered]]
    yield 1, [[clustered, own], [equal, own], [large, own, spread]]


def live_parts(slots, b):
    """The live slots of row b, field by field and head by head, in their order."""
    slots = Slots(slots.keys, slots.values, slots.masses())
    live = slots.live()
    live = torch.ones_like(slots.mass).bool() if live is None else live
    return [t[b, h][live[b, h]] for t in slots.tensors().values() for h in range(HEADS)]


def same_rows_of(method):
    """Checks that the slots of a row are equal, at every time."""

    def assert_same(one, other, b):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_row(mine, b, theirs, b, is_exact(method))

    return assert_same


def assert_same_row(one, b, other, c, exactly=True):
    """Check that row b of ``one`` equals row c of ``other``, bit for bit or up to rounding."""
    for mine, theirs in zip(live_parts(one, b), live_parts(other, c), strict=True):
        assert mine.shape == theirs.shape
        if exactly:
            assert torch.equal(mine, theirs)
        else:
            assert float((mine - theirs).norm()) <= 1e-5 * float(mine.norm())


def dim_of(method):
    return 1 if method == "one_dimensional" else DIM


def is_exact(method):
    """Whether rows are equal bit for bit. heavy_merge solves equations, which are rounded
    differently in a batch of one row."""
    return method != "heavy_merge"


# The budget alone would give batches of 2, which take many steps for each token.
OPTIONS = {"balancekv_streaming": {"batch_size": 8}}
CHUNKS = ((150, 1), (1, 25), (1, 16), (30, 1), (1, 9))  # sizes and how many: prompts and decoding
TOKENS = sum(size * times for size, times in CHUNKS)


def projected(method):
    """The method, with an output projection or rotary frequencies if it needs them."""
    if method.requires.output:
        g = torch.Generator().manual_seed(0)
        method.output = torch.randn(QUERY_HEADS, 3, 7, generator=g)
    if method.requires.rotary:
        method.turn = Turn(torch.tensor([1.0, 0.1]), neighbours=False)
    return method


def streamed(method, rows, padding=None, numbers=None, seed=5):
    """The slots of a stream after every group of chunks. ``padding``: the number of padding tokens
    in front of each row."""
    slots, queries = batch(rows)
    cache = Stream(projected(windowed(method, 2, 5, seed, OPTIONS.get(method))), Budget(40), 4)
    if numbers is not None:
        cache.method.number_rows(torch.tensor(numbers))
    live = torch.arange(TOKENS) >= torch.tensor(padding or [0] * len(rows)).unsqueeze(1)
    seen, start = [], 0
    for count, times in CHUNKS:
        for _ in range(times):
            part = slice(start, start + count)
            cache.extend(slots.narrow(start, count))
            there = None
            if padding is not None and not bool(live[:, part].all()):
                there = live[:, part]
                cache.mark_padding(there)
            observed = Observed(queries[:, :, part], 0.4, live=there)
            cache.settle(observed, prefill=count > 1)
            start += count
        seen.append(cache.slots.map(torch.clone))  # pages are refilled in place
    return seen


@pytest.mark.parametrize("method", BY_PROMPT)
def test_a_row_of_a_cache_is_what_it_is_beside_others(method):
    def made(rows, kinds):
        return streamed(method, rows)

    check_batches(TOKENS, dim_of(method), made, same_rows_of(method))


@pytest.mark.parametrize("method", BY_PROMPT)
def test_a_row_told_its_number_is_what_it_is_in_the_batch(method):
    own, other, third = (row("spread", seed, TOKENS, dim_of(method)) for seed in (1, 2, 3))
    whole = streamed(method, [other, third, own])
    alone = streamed(method, [own], numbers=[2])
    pair = streamed(method, [own, other], numbers=[2, 0])
    for one, mine, both in zip(whole, alone, pair, strict=True):
        assert_same_row(one, 2, mine, 0, is_exact(method))
        assert_same_row(one, 2, both, 0, is_exact(method))
        assert_same_row(one, 0, both, 1, is_exact(method))


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_answers_of_a_row_are_what_they_are_beside_others(method):
    """The logits of a row are the same beside any other rows, after a prompt of 90 tokens and after
    each of 12 decoded ones."""
    model = build("llama").double()
    g = torch.Generator().manual_seed(0)
    own, other, third = torch.randint(3, VOCABULARY, (3, 102), generator=g)

    def logits(*rows):
        ids = torch.stack(rows)
        cache = SketchCache(model.config, method, budget=24, sink=2, recent=6, allocation="even")
        with torch.no_grad():
            steps = [model(ids[:, :90], past_key_values=cache, use_cache=True)]
            for i in range(90, 102):
                steps.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True))
        return torch.stack([step.logits[:, -1] for step in steps], dim=1)

    first, second = logits(own, other)
    for found in (logits(own)[0], logits(own, third, other)[0]):
        torch.testing.assert_close(found, first, rtol=1e-9, atol=1e-9)
    found = logits(third, other, own)[1]
    torch.testing.assert_close(found, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", BY_PROMPT)
def test_padding_of_other_rows_changes_nothing(method):
    """Every kind of row has a padding of its own, another one for the next method. That of the row
    of equal tokens leaves fewer tokens of the prompt than a row keeps."""
    first = BY_PROMPT.index(method)
    by_kind = {kind: (0, 20, 60)[(first + i) % 3] for i, kind in enumerate(KINDS)}
    by_kind["equal"] = 140

    def made(rows, kinds):
        return streamed(method, rows, [by_kind[kind] for kind in kinds])

    check_batches(TOKENS, dim_of(method), made, same_rows_of(method))


@pytest.mark.parametrize(
    "method", sorted({n for n, c in METHODS.items() if not c.requires.queries})
)
def test_dead_slots_of_other_rows_change_nothing(method):
    """A row keeps the same over two compressions without windows, whichever slots of other rows
    are dead."""
    options = {"block": 16} if method == "balancekv" else {}
    g = torch.Generator().manual_seed(0)
    there = torch.rand(6, HEADS, 300, generator=g) < torch.tensor([1, 1, 0.9, 0.5, 0.2, 0.0]).view(
        6, 1, 1
    )
    for b, (first, *others) in batches(300):
        for own in there[[0, 2, 4]]:
            found = []
            for i, rows in enumerate([first, *others]):
                live = torch.stack([there[(i + j) % 6] for j in range(len(rows))])
                live[b] = own
                slots = batch(rows)[0].only(live)
                compressor = METHODS[method](seed=3, **options)
                middle = compressor(slots.narrow(0, 270), 110)
                found.append(compressor(Slots.cat([middle, slots.narrow(270, 30)]), 37))
            for other in found[1:]:
                assert_same_row(found[0], b, other, b)


# With this constant the coins of a walk are not fair.
OF_HALVINGS = {name: {"constant": 0.05} if "balance" in name else {} for name in HALVINGS}
BUILDERS = {
    **{name: lambda seed, cls=cls: cls.for_budget(60, seed=seed) for name, cls in SKETCHES.items()},
    "balancekv_streaming": lambda seed: BalanceKVStreaming(batch_size=8, seed=seed),
    "subgen that widens often": lambda seed: SubGen(s=7, t=3, max_clusters=3, seed=seed),
    "subgen of one radius": lambda seed: SubGen(2.0, s=7, t=2, seed=seed),
    "subgen with a cap": lambda seed: SubGen(
        0.5, s=7, t=2, max_clusters=9, overflow="nearest", seed=seed
    ),
    "coupled with a cap": lambda seed: SubGenCoupled(t=2, max_clusters=20, seed=seed),
    **{
        f"merge_reduce of {name}": lambda seed, name=name, options=options: MergeReduce(
            name, batch_size=16, levels=3, options=options, seed=seed
        )
        for name, options in OF_HALVINGS.items()
    },
    "balancekv_streaming that erases": lambda seed: BalanceKVStreaming(
        batch_size=8, max_tokens=4, constant=0.01, eps=1.0, scaling=1e-6, seed=seed
    ),
}


def tokens_of(name):
    """More tokens than a block of SubGen's has. Merge-and-reduce takes many steps for each token,
    and so gets fewer."""
    return 700 if "subgen" in name or "coupled" in name else 240


def extended(name, rows, live=None, seed=3, start=0, stop=None):
    """A sketch of tokens ``start`` to ``stop``, in chunks of several sizes."""
    slots, _ = batch(rows)
    slots = slots if live is None else slots.only(live)
    sketch = BUILDERS[name](seed)
    for count in (40, 1, 7, slots.count - 100, 20, 1, 31):
        count = min(count, (stop or slots.count) - start)
        sketch.extend(slots.narrow(start, count))
        start += count
    return sketch


def assert_same_sketch_row(one, other, b):
    assert_same_row(one.slots, b, other.slots, b)
    for name in ("failures", "overflowed", "radius"):
        if hasattr(one, name):
            assert torch.equal(getattr(one, name)[b], getattr(other, name)[b])


@pytest.mark.parametrize("name", BUILDERS)
def test_a_row_of_a_sketch_is_what_it_is_beside_others(name):
    def made(rows, kinds):
        return extended(name, rows)

    check_batches(tokens_of(name), dim_of(name), made, assert_same_sketch_row)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_row_of_a_padded_sketch_is_what_it_is_beside_others(name):
    """Padding is anywhere, so that rows take in different numbers of tokens with every chunk. A row
    has none at one place and some at the other, the other way round for the next sketch."""
    g, n = torch.Generator().manual_seed(0), tokens_of(name)
    there = torch.rand(5, 1, n, generator=g) < torch.tensor([1, 0.9, 0.5, 0.1, 0]).view(5, 1, 1)
    there[2, :, : n // 3] = False
    turn = list(BUILDERS).index(name) % 2
    for b, (first, *others) in batches(n, dim_of(name)):
        own = there[2 * ((b + turn) % 2)]
        live = torch.stack([own] * len(first))
        expected = extended(name, first, live)
        for i, rows in enumerate(others):
            live = torch.stack([there[(i + j) % 5] for j in range(len(rows))])
            live[b] = own
            assert_same_sketch_row(expected, extended(name, rows, live), b)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_row_of_a_merge_is_what_it_is_beside_others(name):
    n = tokens_of(name)
    for b, (first, *others) in batches(n, dim_of(name)):
        merged = []
        for rows in (first, *others):
            sketch = extended(name, rows, stop=n - 100)
            sketch.merge(extended(name, rows, seed=4, start=n - 100))
            sketch.extend(batch(rows)[0].narrow(0, 50))
            merged.append(sketch)
        for other in merged[1:]:
            assert_same_sketch_row(merged[0], other, b)


def test_what_a_walk_balances_is_its_own_affair():
    """A head whose values are all zero, for which the walk balances the mass, keeps the same beside
    heads with values."""
    keys, values, queries = row("spread", 1, 240)
    empty, other = (keys, 0 * values, queries), row("spread", 2, 240)
    name = "merge_reduce of softmax_balance"
    assert_same_sketch_row(extended(name, [empty]), extended(name, [empty, other]), 0)


def test_failures_of_erased_buckets_still_count():
    """Failures of an erased bucket count whether or not another row still needs the bucket."""
    name = "balancekv_streaming that erases"
    keys, values, queries = row("spread", 1, 240)
    values = torch.where(torch.arange(240).view(-1, 1) < 100, values, 1000 * values)
    own, other = (keys, values, queries), row("spread", 2, 240)
    alone, beside = extended(name, [own]), extended(name, [own, other])
    assert alone.buckets < beside.buckets
    assert_same_sketch_row(alone, beside, 0)


def test_keys_go_to_the_nearest_cluster_beside_any_others():
    """Keys are assigned as in float64, beside any other rows, also where clusters are so close that
    the rounding of products would decide, and at a distance of exactly delta."""
    g = torch.Generator().manual_seed(0)
    n, clusters = 512, 400
    kind = torch.randint(3, (n,), generator=g)
    far = (2048 * torch.randn(4, 3, 32, generator=g)).round()[:, kind]
    points = (far + torch.randint(-1, 2, (4, n, 32), generator=g)) / 256  # exact in float64
    centers = points[:, torch.randperm(n, generator=g)[:clusters]]
    centers = centers + 0.002 * torch.randn(4, clusters, 32, generator=g)
    live = torch.ones(4, n, dtype=torch.bool)
    used = torch.tensor([clusters, 30, clusters, 0])
    for delta in (1.0, 6 / 256, 5 / 256):  # with a smaller delta there are more new clusters
        wide = torch.full((4,), delta, dtype=torch.float64)
        whole = assign(points, live, centers, used, wide, used + n)
        for r in range(4):
            part, mine = slice(r, r + 1), centers[r : r + 1, : used[r]]
            some = (x[part] for x in (used, wide, used + n))
            alone = assign(points[part], live[part], mine, *some)
            assert torch.equal(alone.cluster[0], whole.cluster[r])
            assert torch.equal(alone.is_new[0], whole.is_new[r])
        if delta == 1.0:
            apart = torch.cdist(points[:1].double(), centers[:1].double())
            assert torch.equal(whole.cluster[:1], apart.argmin(2))
        fresh = points[3, whole.is_new[3]].double()
        apart = torch.cdist(fresh, fresh, compute_mode="donot_use_mm_for_euclid_dist")
        assert float(apart.fill_diagonal_(9.0).min()) > delta


@pytest.mark.parametrize("make_sketch", [OneDimensional, SlidingWindowSampled])
def test_a_row_of_draws_is_what_it_is_beside_others(make_sketch):
    for b, (first, *others) in batches(300, 1):
        draws = []
        for rows in (first, *others):
            slots, queries = batch(rows)
            sketch = make_sketch(40, seed=1)
            sketch.extend(slots)
            drawn = [sketch.sample(queries[:, :, :9], 5) for _ in range(2)]
            draws.append(torch.stack(drawn)[:, :, b])
            assert not torch.equal(*drawn)
        for other in draws[1:]:
            assert torch.equal(draws[0], other)


@pytest.mark.parametrize("method", BY_PROMPT)
def test_the_generator_moves_on_by_as_much_whatever_the_batch(method):
    """After two calls the generator's state is the same for any batch, so that later calls draw the
    same numbers."""
    states = []
    for rows in (["spread"], ["equal", "large"], ["clustered", "clustered", "large"]):
        slots, queries = batch(
            [row(kind, i, TOKENS, dim_of(method)) for i, kind in enumerate(rows)]
        )
        reducer = projected(windowed(method, 2, 5, 3))
        part, start = slots.narrow(0, 0), 0
        for count in (150, 60):
            part = Slots.cat([part, slots.narrow(start, count)])
            observed = Observed(queries[:, :, start : start + count], 0.4)
            part = reducer(part, 40, observed)
            start += count
        holder = reducer.sketch if method in SKETCHES else reducer
        states.append(holder.generator.get_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


RANDOM = {
    "uniform": {},
    "balancekv": {},
    "kernel_halving": {},
    "subgen": {},
    "subgen_coupled": {},
    "merge_reduce": {"halving": "kernel_halving"},
    "balancekv_streaming": {"batch_size": 16},
    "sliding_window_sampled": {"samples": 8},
    "one_dimensional": {},
}


@pytest.mark.parametrize("method", RANDOM)
def test_rows_and_heads_choose_independently(method):
    """12 rows of 2 heads with the same tokens keep 24 different samples."""
    keys, values, _ = row("spread", 1, 150, dim_of(method))
    slots = Slots(*(t[:, :1].expand(12, HEADS, *t.shape[2:]).contiguous() for t in (keys, values)))
    kept = windowed(method, 2, 5, options=RANDOM[method])(slots, 60)
    found = {t.numpy().tobytes() for t in kept.values.flatten(0, 1)}
    assert len(found) == 12 * HEADS


def test_numbers_are_those_of_splitmix64():
    """The numbers are those of Vigna's splitmix64.c with x = 1234567 (as given on Rosetta Code)."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = uniform(torch.tensor([1234567]), 5)
    assert found.tolist() == [[(number >> 11) / 2**53 for number in expected]]


def test_numbers_have_their_place():
    keys = streams(7, torch.tensor([0, 5, 3]), 4)
    whole = uniform(keys, 1000, 60)  # several blocks
    assert whole.dtype == torch.float64
    assert 0 <= float(whole.min()) < float(whole.max()) < 1
    assert torch.equal(whole[:, :, :10], uniform(keys, 10, 60))
    assert torch.equal(whole[1, 2], uniform(keys[1, 2], 1000, 60))
    assert torch.equal(whole[1:], uniform(streams(7, torch.tensor([5, 3]), 4), 1000, 60))
    assert torch.equal(whole, uniform(streams(7, torch.tensor([0, 5, 3]), 9)[:, :4], 1000, 60))
    assert uniform(keys).shape == (3, 4)
    assert uniform(keys, 0, 5).shape == (3, 4, 0, 5)
    assert uniform(keys[:0], 5).shape == (0, 4, 5)


def test_numbers_are_uniform_and_independent():
    """Chi-square tests of single numbers, of their low bits, and of pairs: neighbours within a
    stream, and the same place in neighbouring rows, heads, further streams and calls."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(50)
    first, second = (streams(drawn(generator), rows, 8) for _ in range(2))
    x = uniform(first, 1000)
    more = uniform(derived(first, 0), 1000), uniform(derived(first, 1), 1000)
    pairs = {
        "place": (x[..., :-1], x[..., 1:]),
        "row": (x[:-1], x[1:]),
        "head": (x[:, :-1], x[:, 1:]),
        "call": (x, uniform(second, 1000)),
        "further streams": more,
        "a stream and a further one": (x, more[0]),
        "keys of rows and heads": (x[0, 1:], x[1:8, 0]),
    }
    single = torch.bincount((100 * x).long().flatten(), minlength=100)
    assert stats.chisquare(single).pvalue > SIGNIFICANCE
    low = ((x * 2**53).long() % 64).flatten()
    assert stats.chisquare(torch.bincount(low, minlength=64)).pvalue > SIGNIFICANCE
    for name, (one, other) in pairs.items():
        cells = (16 * one).long() * 16 + (16 * other).long()
        counts = torch.bincount(cells.flatten(), minlength=256)
        assert stats.chisquare(counts).pvalue > SIGNIFICANCE, name
    # Sums over rows, heads and places would show a lattice.
    for dim in range(3):
        count = x.shape[dim]
        sums = (x.sum(dim) - count / 2) / math.sqrt(count / 12)
        assert stats.kstest(sums.flatten().numpy(), "norm").pvalue > SIGNIFICANCE


def test_keys_of_streams_differ():
    number = drawn(torch.Generator().manual_seed(1))
    keys = streams(number, torch.arange(3000), 16)
    later = derived(torch.tensor(number), places(torch.arange(3000), 16) + 1)
    further = derived(keys.unsqueeze(-1), torch.arange(-1, 7))
    every = torch.cat([keys.flatten(), later.flatten(), further.flatten()])
    assert len(every.unique()) == 10 * 3000 * 16


def test_a_copy_goes_on_with_the_same_numbers():
    compressor = make("uniform", 3)
    compressor.rows = torch.tensor([4, 2])
    first = compressor.random((2, 3, 5), torch.device("cpu"))
    twin = copy.deepcopy(compressor)
    again = compressor.random((2, 3, 5), torch.device("cpu"))
    assert torch.equal(again, twin.random((2, 3, 5), torch.device("cpu")))
    assert not torch.equal(first, again)
