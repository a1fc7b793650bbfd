"""BalanceKV's Algorithm 2, its block-parallel form and the inputs that it gets from Algorithm 1
equal the printed loops in float64, on the same uniform numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import Slots
from kvsketch.methods import BalanceKV, SoftmaxBalance, balance
from kvsketch.methods.sketches import BalanceKVStreaming
from kvsketch.methods.sketches.balancekv_bounded import BalanceKVBounded
from kvsketch.random_numbers import derived, uniform

SIGNIFICANCE = 1e-3
STREAMS = torch.tensor([[11, 22, 33]])


def tokens(seed, n, heads=3, dim=3, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    shape = (1, heads, n, dim)
    keys, values = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return Slots(spread * keys, values)


def algorithm_2(keys, values, r_key, r_value, c, numbers, scaling):
    """Lines 2 to 11 as printed, for one head: the signs, and whether line 7 was reached."""
    big_r = math.exp(r_key**2 * scaling / 2) * r_value
    eta, failed = torch.zeros(len(keys), dtype=torch.float64), False
    for j in range(len(keys)):
        y = torch.exp(keys @ keys[j] * scaling) * (values @ values[j])
        inner = float(y @ eta)
        failed |= abs(inner) > c * big_r**2
        p = 0.5 - inner / (2 * c * big_r**2)
        eta[j] = 1.0 if float(numbers[j]) < p else -1.0
    return eta, failed


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(1, 150),
    constant=st.sampled_from([0.02, 0.1, 1.0, 30.0]),
    delta=st.sampled_from([1e-6, 0.01, 0.5]),
    r_key=st.sampled_from([None, 1.0, 6.0]),
    r_value=st.sampled_from([None, 1.0, 6.0]),
    scaling=st.sampled_from([None, 0.2]),
    what=st.sampled_from(["values", "ones", "groups"]),
)
def test_signs_equal_the_printed_loop(seed, n, constant, delta, r_key, r_value, scaling, what):
    """Signs and failures (line 7) are those of R^2 = e^(r_key^2/sqrt d) r_value^2 and
    c = constant log(n/delta), with radii given (larger norms are recorded as failures) or found,
    also on (k, 1) and group by group."""
    slots = tokens(seed, n)
    if what == "ones":
        slots = Slots(slots.keys, slots.values[..., :0])
    number = torch.randint(-2, 2, (1, 3, n), generator=torch.Generator().manual_seed(seed))
    groups = number if what == "groups" else None
    method = SoftmaxBalance(0, scaling, r_key, r_value, delta, constant)
    signs, failed = method.signs(slots, STREAMS, groups)
    numbers = uniform(STREAMS, n)
    c = constant * math.log(n / delta)
    for head in range(3):
        keys = slots.keys[0, head]
        values = slots.values[0, head] if what != "ones" else torch.ones(n, 1).double()
        norm, size = float(keys.norm(dim=-1).max()), values.norm(dim=-1)
        lost = norm > (r_key or math.inf) or float(size.max()) > (r_value or math.inf)
        expected = torch.zeros(n, dtype=torch.float64)
        of = number[0, head] if what == "groups" else torch.zeros(n)
        for group in of.unique():
            at = of == group
            expected[at], beyond = algorithm_2(
                keys[at],
                values[at],
                r_key or norm,
                r_value or float(size[at].max()),
                c,
                numbers[0, head][at],
                3**-0.5 if scaling is None else scaling,
            )
            lost |= beyond
        assert torch.equal(signs[0, head], expected)
        assert bool(failed[0, head]) == lost


@pytest.mark.parametrize("held", [balance._HELD, 3 * 64 * 50])
def test_long_sequences_equal_the_loop(held, monkeypatch):
    """The signs are the same over several panels, with the past of a panel in one or more parts."""
    monkeypatch.setattr(balance, "_HELD", held)
    slots = tokens(5, 400, spread=0.3)
    signs, _ = SoftmaxBalance(constant=0.01).signs(slots, STREAMS)
    for head in range(3):
        keys, values = slots.keys[0, head], slots.values[0, head]
        r_key, r_value = (float(t.norm(dim=-1).max()) for t in (keys, values))
        c = 0.01 * math.log(400 / 0.01)
        numbers = uniform(STREAMS, 400)[0, head]
        expected, _ = algorithm_2(keys, values, r_key, r_value, c, numbers, 3**-0.5)
        assert torch.equal(signs[0, head], expected)


def test_dead_slots_set_no_radius_and_are_not_kept():
    slots = tokens(1, 60, spread=0.3)
    loud = Slots(20 * slots.keys, slots.values).map(lambda t: t[:, :, :9])
    live = torch.arange(69) >= 9
    both = Slots.cat([loud, slots]).only(live)
    quiet = Slots(both.keys * live.view(-1, 1), both.values, both.mass)
    method = SoftmaxBalance(constant=0.05)
    for one, other in zip(method.signs(both, STREAMS), method.signs(quiet, STREAMS), strict=True):
        assert torch.equal(one, other)
    half = method.half(both, STREAMS)
    assert int(half.index[half.real].min()) >= 9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 40), constant=st.sampled_from([0.05, 30.0]))
def test_the_smaller_side_of_the_loop_is_kept(seed, n, constant):
    """The kept tokens are those of lines 12 to 16."""
    slots = tokens(seed, n, heads=3)
    method = SoftmaxBalance(constant=constant)
    signs, _ = method.signs(slots, STREAMS)
    half = method.half(slots, STREAMS)
    for head in range(3):
        up, down = ((signs[0, head] == side).nonzero().flatten().tolist() for side in (1, -1))
        expected = up if len(up) <= len(down) else down
        assert half.index[0, head][half.real[0, head]].tolist() == expected


# ---- section 4: blocks ----


def blocks_loop(keys, values, block, constant, delta, stream):
    """The signs of one head's n tokens: n x d is padded with zeros and reshaped to
    block x n/block x d, and every column is a sequence of its own."""
    n, dim = keys.shape
    columns = -(-n // block)
    numbers = uniform(derived(stream, torch.arange(columns)), block)
    signs = torch.zeros(n)
    for column in range(columns):
        mine = torch.arange(column, n, columns)
        padded = [t.new_zeros(block, dim) for t in (keys, values)]
        for tensor, source in zip(padded, (keys, values), strict=True):
            tensor[: len(mine)] = source[mine]
        r_key, r_value = (float(t.norm(dim=-1).max()) for t in padded)
        c = constant * math.log(block / delta)
        eta, _ = algorithm_2(*padded, r_key, r_value, c, numbers[column], dim**-0.5)
        signs[mine] = eta[: len(mine)].float()
    return signs


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    half_n=st.integers(1, 60),
    block=st.integers(2, 50),
    constant=st.sampled_from([0.02, 0.3, 30.0]),
)
def test_blocks_equal_the_loop_and_exactly_half_is_kept(seed, half_n, block, constant):
    n = 2 * half_n
    slots = tokens(seed, n)
    half = BalanceKV(block=block, constant=constant).half(slots, STREAMS)
    assert bool(half.real.all())
    assert half.index.shape[2] == half_n
    for head in range(3):
        signs = blocks_loop(
            slots.keys[0, head], slots.values[0, head], block, constant, 0.01, STREAMS[0, head]
        )
        kept = signs[half.index[0, head]]
        # all of one side, and as many of the other as it takes
        assert int((kept > 0).sum()) == min(half_n, int((signs > 0).sum()))


def clustered(heads, n=256, dim=8, seed=0):
    """Slots whose keys and values form four clusters, and queries."""
    g = torch.Generator().manual_seed(seed)
    centers, means = (torch.randn(1, heads, 4, dim, generator=g) for _ in range(2))
    own = torch.randint(4, (n,), generator=g)
    noise = torch.randn(2, 1, heads, n, dim, generator=g)
    slots = Slots(centers[:, :, own] + 0.1 * noise[0], means[:, :, own] + 0.1 * noise[1])
    return slots, torch.randn(1, heads, 8, dim, generator=g)


def discrepancy(slots, index, queries):
    """|sum over the kept - sum over the dropped|, of exp(<q, k>/sqrt d) v: ``[heads]``."""
    sign = torch.full(slots.keys.shape[:3], -1.0).scatter(2, index, 1.0).unsqueeze(-1)
    weight = torch.exp(slots.keys @ queries.mT * slots.keys.shape[-1] ** -0.5)
    return torch.einsum("bhnq,bhnd->bhqd", weight * sign, slots.values).norm(dim=(-1, -2))[0]


def test_balancing_helps_on_clustered_keys_and_hardly_with_the_printed_constant():
    """Over 500 heads that keep half of 256 tokens, the discrepancy with constant 0.02 is smaller
    than that of a uniform half (paired t-test), on average less than half of it; with 30, where
    c = 305, the two do not differ significantly."""
    slots, queries = clustered(500)
    coins = torch.rand(1, 500, 256, generator=torch.Generator().manual_seed(9))
    chance = discrepancy(slots, coins.argsort(-1)[..., :128], queries)
    small, printed = (
        discrepancy(slots, BalanceKV(seed=3, constant=c).half(slots).index, queries)
        for c in (0.02, 30.0)
    )
    assert stats.ttest_rel(small, chance, alternative="less").pvalue < SIGNIFICANCE
    assert float(small.mean() / chance.mean()) < 0.5
    assert stats.ttest_rel(printed, chance).pvalue > SIGNIFICANCE


def test_what_fills_up_the_half_is_chosen_at_random():
    """Over 4,000 heads with the same tokens, each token is kept equally often (chi-square test),
    also where more or fewer than half of them have sign +1."""
    slots = tokens(0, 12, heads=1).map(lambda t: t.expand(1, 4000, 12, 3).contiguous())
    half = BalanceKV(seed=1, block=4).half(slots)
    counts = half.index.flatten().bincount(minlength=12)
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE


# ---- Algorithm 1: what its instances hand over ----


def recorded(monkeypatch, name):
    """A list of all calls of one of SoftmaxBalance's methods: the object, the arguments and the
    result."""
    calls, original = [], getattr(SoftmaxBalance, name)

    def wrapped(self, *arguments):
        found = original(self, *arguments)
        calls.append((self, *arguments, found))
        return found

    monkeypatch.setattr(SoftmaxBalance, name, wrapped)
    return calls


@pytest.mark.parametrize("r", [None, 1.0])
@pytest.mark.parametrize(("given_delta", "delta"), [(None, 1 / 4096**2), (0.3, 0.3)])
def test_instances_of_algorithm_1_are_the_printed_loop(r, given_delta, delta, monkeypatch):
    """The denominator balances (k, 1) and every bucket its own (k, v), in batches of t, with
    r_key = r and, if not given, delta = 1/n^2."""
    slots = tokens(3, 300, heads=1, spread=0.4)
    calls = recorded(monkeypatch, "half")
    sketch = BalanceKVStreaming(r, 32, max_tokens=4096, constant=0.05, delta=given_delta, seed=1)
    sketch.extend(slots.narrow(0, 130))
    sketch.extend(slots.narrow(130, 170))
    widths = set()
    for _, batch, streams, half in calls:
        batch_rows = batch.keys.shape[1]
        assert batch.count == 32
        for row in range(batch_rows):
            keys, values = batch.keys[0, row], batch.values[0, row]
            live = batch.masses()[0, row] > 0
            widths.add(values.shape[1])
            if values.shape[1]:  # one bucket: values as they came, within a factor 2
                size = values[live].norm(dim=-1)
                assert float(size.max()) < 2 * float(size.min())
            else:
                values = live.double().unsqueeze(1)
            keys = keys * live.unsqueeze(1)
            expected, _ = algorithm_2(
                keys,
                values,
                r or float(keys.norm(dim=-1).max()),
                float(values.norm(dim=-1).max()),
                0.05 * math.log(32 / delta),
                uniform(streams, 32)[0, row],
                3**-0.5,
            )
            sides = [((expected == s) & live).nonzero().flatten().tolist() for s in (1, -1)]
            smaller = sides[0] if len(sides[0]) <= len(sides[1]) else sides[1]
            assert half.index[0, row][half.real[0, row]].tolist() == smaller
    assert widths == {0, 3}
    used = torch.cat([streams.flatten() for _, _, streams, _ in calls])
    assert len(used.unique()) == len(used)  # every halving has random numbers of its own


def test_a_buckets_random_numbers_do_not_depend_on_the_other_buckets():
    """A bucket keeps the same tokens alone as beside a lower one."""
    slots = tokens(4, 100, heads=1)
    slots = Slots(slots.keys, slots.values / slots.values.norm(dim=-1, keepdim=True) * 1.5)
    small = Slots(slots.keys[:, :, :3], slots.values[:, :, :3] / 4)

    def kept(first):
        sketch = BalanceKVStreaming(batch_size=8, seed=2)
        sketch.extend(Slots.cat([first, slots]) if first else slots)
        held = sketch.slots
        size = (held.values / held.values.norm(dim=-1, keepdim=True).clamp(min=1e-9)) * 1.5
        large = held.values.norm(dim=-1) > 1
        return sorted(size[large].flatten().tolist())

    assert kept(small) == kept(None)


@pytest.mark.parametrize(("given_delta", "delta"), [(None, 1 / 4096**2), (0.3, 0.3)])
def test_instances_within_a_budget_are_the_printed_loop(given_delta, delta, monkeypatch):
    """The denominator balances (k, 1) and the numerator the weighted values, bucket by bucket, both
    on the same random numbers."""
    slots = tokens(6, 400, heads=2, spread=0.4)
    calls = recorded(monkeypatch, "signs")
    sketch = BalanceKVBounded(
        120, 32, r=1.0, max_tokens=4096, constant=0.05, delta=given_delta, seed=1
    )
    sketch.extend(slots)
    numerators, denominators = calls[0::2], calls[1::2]
    assert len(numerators) == len(denominators) > 3
    exact = Slots(slots.keys, slots.values)
    for (_, above, streams, bucket, found), (_, ones, same, other) in zip(
        numerators, denominators, strict=True
    ):
        assert torch.equal(streams, same)
        assert ones.values.shape[3] == 0
        rows, batches, n = above.keys.shape[:3]
        for row in range(rows):
            for number in range(batches):
                keys = above.keys[row, number]
                weights = above.masses()[row, number]
                place = (exact.keys[0].flatten(0, 1)[None] == keys[:, None]).all(-1).byte()
                values = exact.values[0].flatten(0, 1)[place.argmax(1)] * weights.unsqueeze(1)
                torch.testing.assert_close(above.values[row, number], values)
                numbers = uniform(streams, n)[row, number]
                c = 0.05 * math.log(n / delta)
                below = ones.masses()[row, number].double().unsqueeze(1)
                live = below[:, 0] > 0
                expected, _ = algorithm_2(
                    keys * live[:, None], below, 1.0, float(below.max()), c, numbers, 3**-0.5
                )
                assert torch.equal(other[0][row, number], expected)
                own = torch.frexp((values / weights.unsqueeze(1)).norm(dim=-1)).exponent
                there = weights > 0
                for value in own[there].unique():
                    at = (own == value) & there
                    assert len(bucket[row, number][at].unique()) == 1
                    expected, _ = algorithm_2(
                        keys[at],
                        values[at],
                        1.0,
                        float(values[at].norm(dim=-1).max()),
                        c,
                        numbers[at],
                        3**-0.5,
                    )
                    assert torch.equal(found[0][row, number][at], expected)
