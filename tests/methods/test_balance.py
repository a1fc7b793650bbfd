"""BalanceKV (the walk, SoftmaxBalance, merge-and-reduce, buckets of value norms), and the halvings
of pairs."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import InputError, Slots, attend
from kvsketch.methods import HALVINGS, BalanceKV, GreedyHalving, SoftmaxBalance, make
from kvsketch.methods.balance import Lifted, Plain, balance, self_balancing_walk
from kvsketch.methods.sketches import BalanceKVStreaming, MergeReduce

SIGNIFICANCE = 1e-3


def tokens(seed, n, heads=2, dim=4, batch=1, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, dim)
    return Slots(spread * torch.randn(shape, generator=g), torch.randn(shape, generator=g))


def walk_loop(vectors, radius, delta, constant, uniform):
    """Algorithm 4 as printed, in float64."""
    n = len(vectors)
    c = constant * math.log(n / delta)
    total, signs, failed = torch.zeros_like(vectors[0]), [], False
    for u, coin in zip(vectors, uniform, strict=True):
        inner = float(total @ u)
        failed |= abs(inner) > c * radius**2
        p = 0.5 - inner / (2 * c * radius**2)
        signs.append(1.0 if coin < p else -1.0)
        total = total + signs[-1] * u
    return torch.tensor(signs), failed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999), n=st.integers(1, 200), constant=st.sampled_from([0.05, 1.0, 30.0])
)
def test_walk_equals_the_printed_loop(seed, n, constant):
    g = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, n, 5, generator=g, dtype=torch.float64)
    radius = float(vectors.norm(dim=-1).max())
    signs, failed = self_balancing_walk(
        vectors, radius, 0.1, constant=constant, generator=torch.Generator().manual_seed(seed)
    )
    uniform = torch.rand(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for row in range(2):
        expected, lost = walk_loop(vectors[row], radius, 0.1, constant, uniform[row])
        assert torch.equal(signs[row].float(), expected)
        assert bool(failed[row]) == lost


def test_walk_beats_independent_signs():
    """With a small constant the signed sum has a far smaller standard deviation than the sqrt(n)
    of independent signs."""
    vectors = torch.ones(200, 1000, 1, dtype=torch.float64)
    signs, failed = self_balancing_walk(
        vectors, 1.0, 0.1, constant=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert not bool(failed.any())
    spread = float((signs.unsqueeze(-1) * vectors).sum(1).std())
    assert spread < 0.25 * 1000**0.5
    # sub-Gaussian with variance c^2/(2c - 1) R^2, c = log(n/delta)
    c = math.log(1000 / 0.1)
    assert spread < (c**2 / (2 * c - 1)) ** 0.5 * 1.2


def test_walk_failure_is_surfaced():
    signs, failed = self_balancing_walk(
        torch.ones(500, 50, 1), 1.0, 0.5, constant=0.6, generator=torch.Generator().manual_seed(0)
    )
    assert 0 < int(failed.sum()) < 500
    assert bool((signs.abs() == 1).all())
    with pytest.raises(InputError, match="radius="):
        self_balancing_walk(torch.ones(1, 3, 1), 0.5, 0.1)
    with pytest.raises(InputError, match="delta="):
        self_balancing_walk(torch.ones(1, 3, 1), 1.0, 0.0)
    with pytest.raises(InputError, match="constant="):
        self_balancing_walk(torch.ones(1, 3, 1), 1.0, 0.5, constant=0.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(1, 150))
def test_balance_hands_over_the_true_inner_products(seed, n):
    """The rule is called with <signed sum, v> and |v|^2, across panels, for plain and for lifted
    vectors."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, n, 3, generator=g, dtype=torch.float64)
    values = torch.randn(2, n, 2, generator=g, dtype=torch.float64)
    shift = torch.tensor([0.3, 1.0], dtype=torch.float64)
    gram = torch.exp(0.5 * keys @ keys.transpose(1, 2) - shift[:, None, None]) * (
        values @ values.transpose(1, 2)
    )
    for vectors, matrix in (
        (Lifted(keys, values, 0.5, shift), gram),
        (Plain(keys), keys @ keys.transpose(1, 2)),
    ):
        coins = torch.where(torch.rand(2, n, generator=g) < 0.5, 1.0, -1.0).double()
        seen = []

        def rule(pending, norm, step, seen=seen, coins=coins):
            seen.append((pending.clone(), norm.clone()))
            return coins[:, step]

        signs = balance(vectors, rule)
        assert torch.equal(signs, coins)
        for step, (pending, norm) in enumerate(seen):
            expected = (matrix[:, step, :step] * coins[:, :step]).sum(-1)
            torch.testing.assert_close(pending, expected)
            torch.testing.assert_close(norm, matrix[:, step, step])


def discrepancy(slots, half, queries):
    """|sum over the kept - sum over the dropped| of exp(<q,k>/sqrt d) v, per head."""
    n = slots.count
    kept = torch.zeros(slots.keys.shape[:3]).scatter(2, half.index, half.real.float())
    weight = torch.exp(slots.keys @ queries.transpose(-1, -2) * slots.keys.shape[-1] ** -0.5)
    sign = (2 * kept - 1).unsqueeze(-1)
    assert kept.shape[2] == n
    return torch.einsum("bhnq,bhnd->bhqd", weight * sign, slots.values).norm(dim=-1)


def test_softmax_balance_keeps_the_smaller_side_and_the_bound_of_theorem_3_2():
    """Each of 300 heads keeps at most half its tokens, and at most a share delta of the
    discrepancies exceeds sqrt(s) sqrt(2c^2/(2c-1) ln(2s/delta)) e^... (the constant of the O()
    follows from the walk's sub-Gaussian spread)."""
    n, dim, delta = 128, 4, 0.05
    slots = tokens(1, n, heads=300, dim=dim, spread=0.5)
    queries = torch.randn(1, 300, 3, dim, generator=torch.Generator().manual_seed(2)) * 0.5
    half = SoftmaxBalance(seed=3, delta=delta).half(slots)
    assert half.index.shape[2] == n // 2
    assert int(half.real.sum(-1).max()) <= n // 2
    assert not bool(half.failed.any())
    c = 30 * math.log(n / delta)
    kappa = math.sqrt(2 * c**2 / (2 * c - 1) * math.log(2 * dim / delta))
    largest = slots.keys.norm(dim=-1).amax(-1) ** 2 / (2 * dim**0.5)
    bound = (
        math.sqrt(dim)
        * kappa
        * torch.exp(queries.norm(dim=-1) ** 2 / (2 * dim**0.5) + largest.unsqueeze(-1))
        * slots.values.norm(dim=-1).amax(-1, keepdim=True)
    )
    broken = (discrepancy(slots, half, queries) > bound).float().mean()
    assert float(broken) <= delta


def test_softmax_balance_on_ones_balances_the_mass():
    """With values of width 0 the walk runs on (k, 1), as for the denominator: with a small
    constant, equal keys are split more evenly than by coin flips."""
    slots = Slots(torch.zeros(1, 200, 64, 3), torch.zeros(1, 200, 64, 0))
    half = SoftmaxBalance(seed=0, constant=0.5, delta=0.5).half(slots)
    fair = SoftmaxBalance(seed=0, constant=1e6).half(slots)
    kept, coins = (32 - h.real.sum(-1).float() for h in (half, fair))
    assert float(kept.mean()) < 0.6 * float(coins.mean())


def test_norms_beyond_the_radius_are_recorded_or_refused():
    slots = tokens(0, 32, heads=2)
    recorded = SoftmaxBalance(r_key=0.5).half(slots)
    assert bool(recorded.failed.all())
    assert bool(torch.isfinite(recorded.of(slots).keys).all())
    with pytest.raises(InputError, match=r"r_key=0\.5"):
        SoftmaxBalance(r_key=0.5, on_fail="raise").half(slots)
    with pytest.raises(InputError, match=r"r_value=0\.1"):
        SoftmaxBalance(r_value=0.1, on_fail="raise").half(slots)
    with pytest.raises(InputError, match="walk failed"):
        SoftmaxBalance(constant=1e-3, delta=0.5, on_fail="raise").half(
            Slots(torch.zeros(1, 1, 64, 2), torch.ones(1, 1, 64, 1))
        )


@pytest.mark.parametrize("name", ["balancekv", "kernel_halving", "greedy_halving"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), half_n=st.integers(1, 40), padding=st.integers(0, 9))
def test_exactly_half_is_kept_and_mass_is_preserved(name, seed, half_n, padding):
    n = 2 * half_n
    slots = tokens(seed, n, batch=2)
    live = torch.ones(2, 2, n, dtype=torch.bool)
    live[0, :, : min(padding, n - 1)] = False
    slots = slots.only(live)
    half = HALVINGS[name](seed=seed).half(slots)
    assert half.index.shape == (2, 2, n // 2)
    kept = half.of(slots)
    assert int((kept.mass[1] > 0).sum(-1).min()) == n // 2
    real = int(live[0, 0].sum())
    assert int((kept.mass[0, 0] > 0).sum()) == -(-real // 2)
    assert half.index.sort(-1).values.diff(dim=-1).min() > 0 if n > 2 else True


@pytest.mark.parametrize("name", ["balancekv", "kernel_halving", "greedy_halving"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(2, 60), budget=st.integers(1, 60))
def test_halving_to_any_budget_preserves_the_mass(name, seed, n, budget):
    out = make(name, seed)(tokens(seed, n), budget)
    assert out.count == min(n, budget)
    total = out.masses().sum(-1)
    assert 0.4 * n <= float(total.min()) <= float(total.max()) <= 2.2 * n  # odd counts round
    if budget * 2 ** round(math.log2(n / budget)) == n or budget >= n / 2:
        assert torch.equal(total, torch.full_like(total, float(n)))


@pytest.mark.parametrize("name", ["kernel_halving", "greedy_halving"])
def test_pair_halvings_beat_coin_flips(name):
    """Over 200 heads, whose values lie around a mean, the discrepancy is smaller than that of a
    random choice from each pair."""
    g = torch.Generator().manual_seed(0)
    n, heads, dim = 128, 200, 8
    keys = 0.7 * torch.randn(1, heads, n, dim, generator=g)
    values = torch.randn(1, heads, 1, dim, generator=g) + 0.3 * torch.randn(
        1, heads, n, dim, generator=g
    )
    slots = Slots(keys, values)
    queries = torch.randn(1, heads, 4, dim, generator=g)
    half = HALVINGS[name](seed=1).half(slots)
    coins = copy.copy(half)
    index = torch.arange(0, n, 2) + torch.randint(0, 2, half.index.shape, generator=g)
    object.__setattr__(coins, "index", index)
    ratio = discrepancy(slots, half, queries).mean() / discrepancy(slots, coins, queries).mean()
    assert float(ratio) < (0.95 if name == "kernel_halving" else 0.7), float(ratio)


@pytest.mark.parametrize("name", ["kernel_halving", "balancekv"])
def test_every_token_is_kept_equally_often(name):
    """Over 4,000 heads every token is kept equally often by the halvings that are a fair choice
    (chi-square test)."""
    slots = tokens(0, 16, heads=1).map(lambda x: x.expand(1, 4000, *x.shape[2:]).contiguous())
    half = HALVINGS[name](seed=5).half(slots)
    counts = torch.bincount(half.index.flatten(), minlength=16)
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE


def test_greedy_takes_the_smaller_residual():
    slots = Slots(torch.zeros(1, 1, 6, 1), torch.tensor([3.0, 0, 5, 0, 1, 0]).view(1, 1, 6, 1))
    found = set()
    for seed in range(8):
        half = GreedyHalving(seed=seed).half(slots)
        found.add(tuple(half.of(slots).values.flatten().tolist()))
    # whichever of (3, 0) the coin keeps, 5 goes to the other side, and then 1 to the first side
    assert found == {(3.0, 0.0, 1.0), (0.0, 5.0, 0.0)}


def schedule(j, t, top):
    """Algorithm 3 as printed: the number of slots in every level after j tokens."""
    levels = [0] * 40
    for step in range(1, j + 1):
        levels[0] += 1
        if step % t:
            continue
        p, i = step // t, 0
        while i != top:
            levels[i + 1] += t // 2
            levels[i] = 0
            i += 1
            if p % 2:
                break
            p //= 2
    return levels


@settings(max_examples=40, deadline=None)
@given(
    halving=st.sampled_from(sorted(HALVINGS)),
    n=st.integers(1, 150),
    half_t=st.integers(1, 8),
    top=st.sampled_from([None, 1, 2]),
    cuts=st.lists(st.integers(0, 150), max_size=4),
)
def test_levels_follow_the_paper_whatever_the_chunks(halving, n, half_t, top, cuts):
    t = 2 * half_t
    slots = tokens(n, n)
    sketch = MergeReduce(halving, batch_size=t, levels=top, seed=1)
    edges = sorted({0, n, *(c % (n + 1) for c in cuts)})
    for start, stop in itertools.pairwise(edges):
        sketch.extend(slots.narrow(start, stop - start))
    levels = sketch._levels()
    expected = schedule(n, t, top)
    for level in range(levels.depth):
        assert levels.fill(level).unique().tolist() == [expected[level]]
    assert sum(expected[levels.depth :]) == 0
    if halving != "softmax_balance":
        total = sketch.slots.masses().sum(-1)
        assert torch.equal(total, torch.full_like(total, float(n)))


@pytest.mark.slow
def test_memory_is_t_per_level():
    sketch = MergeReduce("balancekv", batch_size=32, seed=0)
    for n in (512, 1024, 2048):
        while sketch.seen < n:
            sketch.extend(tokens(sketch.seen, 128))
        assert sketch.slots.count <= 32 * (math.log2(n / 32) + 2)


def test_merge_and_reduce_of_merged_streams():
    """Every level of a merged sketch has fewer slots than a batch, and the mass is the number of
    tokens of both."""
    for left, right in ((37, 90), (64, 64), (5, 300), (300, 5)):
        a = MergeReduce("kernel_halving", batch_size=16, seed=1)
        b = MergeReduce("kernel_halving", batch_size=16, seed=2)
        a.extend(tokens(1, left))
        b.extend(tokens(2, right))
        a.merge(b)
        assert a.seen == left + right
        levels = a._levels()
        assert all(int(levels.fill(i).max()) < 16 for i in range(levels.depth))
        total = a.slots.masses().sum(-1)
        assert torch.equal(total, torch.full_like(total, float(left + right)))
        assert b.seen == right


@pytest.mark.parametrize("kind", ["merge_reduce", "balancekv_streaming"])
def test_merged_halves_err_like_one_sketch(kind):
    """Over 1,000 heads the errors have the same distribution (Kolmogorov-Smirnov test)."""
    heads, n = 1000, 256
    slots = tokens(4, n, heads=1).map(lambda x: x.expand(1, heads, *x.shape[2:]).contiguous())
    queries = torch.full((1, heads, 1, 4), 0.3)
    exact = attend(queries, slots)

    def build(seed):
        if kind == "merge_reduce":
            return MergeReduce("kernel_halving", batch_size=32, seed=seed)
        return BalanceKVStreaming(batch_size=32, seed=seed)

    whole, left, right = build(1), build(2), build(3)
    whole.extend(slots)
    left.extend(slots.narrow(0, 128))
    right.extend(slots.narrow(128, 128))
    left.merge(right)
    errors = [(attend(queries, s.slots) - exact).norm(dim=-1).flatten() for s in (whole, left)]
    assert stats.ks_2samp(*(e.numpy() for e in errors)).pvalue > SIGNIFICANCE


def test_buckets_hold_values_by_norm():
    """Bucket i contains the values with 2^(i-1) <= |v| < 2^i; values of zero enter only the
    denominator."""
    g = torch.Generator().manual_seed(0)
    norms = torch.tensor([0.0, 0.6, 1.0, 1.9, 3.0, 7.5]).repeat(8)
    values = torch.tensor([0.0, 1.0, 0.0]) * norms.view(1, 1, -1, 1)
    sketch = BalanceKVStreaming(batch_size=64)
    sketch.extend(Slots(torch.randn(1, 1, 48, 3, generator=g), values))
    assert sketch.meta["lowest"] == 0
    assert sketch.buckets == 4  # [.5, 1), [1, 2), [2, 4), [4, 8)
    fills = sketch._levels("numerator").fill(0).view(-1).tolist()
    assert fills == [8, 16, 8, 8]
    assert sketch._levels("denominator").fill(0).tolist() == [[48]]
    slots = sketch.slots
    assert int((slots.mass == 0).sum()) == 40
    assert float(slots.mass.sum()) == 48


def test_small_buckets_are_erased_and_stay_so():
    """Line 9, with 2n: a bucket below eps/(2n) e^(-r^2/sqrt d) v_max is erased, and later values
    of its size are dropped."""
    keys = torch.zeros(1, 1, 1, 4)
    sketch = BalanceKVStreaming(r=1.0, batch_size=8, eps=0.5, max_tokens=8)
    limit = 0.5 / 16 * math.exp(-0.5)  # times v_max
    small, large = 0.9 * limit / 2, 1.0
    sketch.extend(Slots(keys, torch.full((1, 1, 1, 1), small)))
    assert sketch.buckets == 1
    sketch.extend(Slots(keys, torch.full((1, 1, 1, 1), large)))
    assert sketch.meta["lowest"] >= math.floor(math.log2(limit))
    values = sketch.slots.values[sketch.slots.mass == 0]
    assert values.tolist() == [[large]]
    sketch.extend(Slots(keys, torch.full((1, 1, 1, 1), small)))
    assert float(sketch.slots.values[sketch.slots.mass == 0].sum()) == large
    assert float(sketch.slots.mass.sum()) == 3


def test_before_the_first_batch_it_is_exact():
    slots = tokens(3, 31, batch=2)
    sketch = BalanceKVStreaming(batch_size=32)
    for start in range(31):
        sketch.extend(slots.narrow(start, 1))
    queries = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(queries, sketch.slots), attend(queries, slots))


def test_refusal_leaves_the_sketch_as_it_was():
    sketch = BalanceKVStreaming(r=3.0, batch_size=4, on_fail="raise", constant=30.0)
    good = tokens(0, 11, spread=0.3)
    sketch.extend(good)
    before = copy.deepcopy(sketch)
    with pytest.raises(InputError, match=r"beyond r=3\.0"):
        sketch.extend(tokens(1, 20, spread=9.0))
    assert sketch.seen == 11
    for name, tensor in before.state.items():
        assert torch.equal(sketch.state[name], tensor), name
    recorded = BalanceKVStreaming(r=3.0, batch_size=4)
    recorded.extend(tokens(1, 20, spread=9.0))
    assert int(recorded.failures.min()) > 0
    # this walk fails in the middle of a chunk, after earlier batches were halved
    fragile = MergeReduce(
        "softmax_balance",
        batch_size=16,
        options={"on_fail": "raise", "constant": 0.02, "delta": 0.5},
        seed=0,
    )
    ones = Slots(torch.zeros(1, 1, 12, 2), torch.ones(1, 1, 12, 1))
    fragile.extend(ones)
    kept = copy.deepcopy(fragile)
    with pytest.raises(InputError, match="walk failed"):
        fragile.extend(Slots.cat([ones] * 20))
    for name, tensor in kept.state.items():
        assert torch.equal(fragile.state[name], tensor), name
    assert torch.equal(fragile.slots.values, kept.slots.values)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: MergeReduce(batch_size=3), "batch_size=3"),
        (lambda: MergeReduce(batch_size=0), "batch_size=0"),
        (lambda: MergeReduce("balance_kv"), "did you mean 'balancekv'"),
        (lambda: MergeReduce(levels=0), "levels=0"),
        (lambda: MergeReduce(options={"blok": 3}), "blok"),
        (lambda: BalanceKVStreaming(eps=0.0), r"eps=0\.0"),
        (lambda: BalanceKVStreaming(r=-1.0), r"r_key=-1\.0"),
        (lambda: BalanceKVStreaming(max_tokens=0), "max_tokens=0"),
        (lambda: BalanceKVStreaming(delta=1.5), r"delta=1\.5"),
        (lambda: BalanceKV(block=1), "block=1"),
        (lambda: SoftmaxBalance(on_fail="skip"), "on_fail='skip'"),
    ],
)
def test_bad_arguments_are_named(build, named):
    with pytest.raises(InputError, match=named):
        build()
