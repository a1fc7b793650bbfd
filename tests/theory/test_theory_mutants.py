"""The calculators solve the theorems' inequalities, which are solved here by other means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.theory import (
    balancekv,
    barrier,
    break_even,
    clusterability,
    clusters_for_diameter,
    clusters_in_ball,
    covering_number,
    error_bounds,
    index_bits,
    index_game,
    low_dimensional,
    merge_and_reduce,
    non_adaptive_pair,
    sliding_window,
    subgen,
)
from kvsketch.theory.balance import BalanceKVSize, MergeAndReduceSize
from kvsketch.theory.parameters import samples_within


def least(holds, low=1):
    """The least integer from ``low`` on for which ``holds`` is true; ``holds`` is monotone."""
    high = low
    while not holds(high):
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


# ---- SubGen, Theorem 1 ----


@given(eps=st.sampled_from([0.1, 0.5, 1.0]), d=st.sampled_from([1, 64]), m=st.integers(1, 500))
def test_s_is_what_chebyshev_needs_at_a_third_of_eps_and_half_of_the_failure(eps, d, m):
    size = subgen(eps, 0.3, 1.0, 4096, d, 0.02, m)
    # E|error|^2 <= d/s |a|^2 |V|_op^2; Pr[error > eps/3 ...] <= d/s / (eps/3)^2
    assert size.s == least(lambda s: d / s / (eps / 3) ** 2 <= 0.01 * (1 + 1e-12))


@pytest.mark.parametrize("m", [None, 1, 40])
@pytest.mark.parametrize(("delta", "r"), [(0.01, 1.0), (0.4, 1.5), (1.0, 4.0)])
def test_t_is_the_least_that_a_tail_bound_allows(m, delta, r):
    """The means of all clusters are within 1 +- eps/3 but for a probability of failure/2, for
    values within a factor B = e^(2 delta r), by the two-sided bounds of Chernoff, Hoeffding or
    Bernstein."""
    eps, failure, n = 0.6, 0.02, 1000
    size = subgen(eps, delta, r, n, 8, failure, m)
    allowed, factor, e = failure / 2 / (m or n), math.exp(2 * delta * r), eps / 3
    exponents = {
        "chernoff": e**2 / (3 * factor),
        "hoeffding": 2 * e**2 / (factor - 1) ** 2,
        "bernstein": e**2 / (2 * ((factor - 1) ** 2 / (4 * factor) + (factor - 1) * e / 3)),
    }
    needed = {
        name: least(lambda t, x=x: 2 * math.exp(-t * x) <= allowed) for name, x in exponents.items()
    }
    assert samples_within(factor, e, allowed) == needed
    assert size.t == min(needed.values())
    assert needed[size.tail] == size.t
    assert size.slots == size.s + size.t * (m or 1)


# ---- Compression Barriers, Theorem 25 and Lemmas 13, 14 ----


@given(
    eps=st.sampled_from([0.1, 0.5, 1.0]),
    v_max=st.sampled_from([1.0, 7.0]),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    n=st.integers(1, 1000),
    d=st.integers(1, 64),
)
def test_theorem_25_is_chebyshev_at_a_third_and_hoeffding_for_the_median(eps, v_max, share, n, d):
    """An average of T fails with probability Var/(T (eps mean)^2) <= v_max mean/(T (eps mean)^2)
    <= 1/3. The median of Q fails only if Q/2 do, Q/6 more than expected: e^(-2 Q/36) for each of
    n d events."""
    mean = share * v_max
    size = sliding_window(eps, 0.05, v_max, mean, n, d)
    failing = lambda t: v_max * mean / (t * (eps * mean) ** 2)  # noqa: E731
    assert size.per_mean == least(lambda t: failing(t) <= (1 + 1e-12) / 3)
    assert size.means == least(lambda q: n * d * math.exp(-2 * q * (1 / 6) ** 2) <= 0.05)
    printed = least(lambda q: 2 * n * d * math.exp(-q / 12) <= 0.05)
    assert size.means_as_printed == printed


def test_lemmas_13_and_14_are_the_volumes_of_balls():
    for d, delta, radius in ((1, 0.5, 1.0), (2, 0.5, 1.0), (3, 0.25, 2.0)):
        ratio = radius / delta
        assert covering_number(d, delta, radius) == (3 * ratio) ** d
        assert clusters_for_diameter(d, delta, radius) == (1 + 4 * ratio) ** d
    assert covering_number(4, 1.0) == clusters_for_diameter(4, 2.0) == 1


# ---- BalanceKV, Theorems 3.1 and 3.3 ----

SIZES = st.fixed_dictionaries(
    {
        "eps": st.sampled_from([0.05, 0.5, 1.0]),
        "r": st.sampled_from([0.0, 0.5, 2.0]),
        "n": st.sampled_from([100, 10**5, 10**9, 10**14]),
        "d": st.sampled_from([1, 16, 128]),
        "value_dim": st.sampled_from([None, 1, 9]),
        "failure": st.sampled_from([0.001, 0.2]),
        "constant": st.sampled_from([1.0, 30.0]),
        "queries": st.sampled_from([1, 1000]),
    }
)


def theorem_3_3_holds(t, calls, eps, r, n, d, value_dim, failure, constant, queries):
    """Whether batches of t satisfy Theorem 3.3, by its proof: some walk fails with probability at
    most failure/2, and some error exceeds its bound with probability at most failure/2."""
    s = d if value_dim is None else value_dim
    number = calls * max(1.0, n / t)
    c = constant * math.log(t / (failure / (8 * number)))
    proxy = c**2 / (2 * c - 1)  # the walk's variance over R^2
    each = failure / (2 * number * queries)
    deviation = math.sqrt(2 * proxy * math.log(2 * s / each))
    levels = max(1, math.ceil(math.log2(n / t)))
    error_per_token = levels / t * math.sqrt(s) * deviation * math.exp(r * r / math.sqrt(d))
    return error_per_token <= eps * math.exp(-r * r / math.sqrt(d)) * (1 + 1e-12)


@settings(max_examples=80, deadline=None)
@given(given=SIZES)
def test_theorem_3_3_and_3_1_have_the_least_even_batch(given):
    size = merge_and_reduce(**given)
    half = least(lambda x: theorem_3_3_holds(2 * x, 2, **given))
    assert size.t == 2 * half
    assert size.levels == max(1, math.ceil(math.log2(given["n"] / size.t)))
    assert size.slots == (size.levels + 1) * size.t
    whole = balancekv(**given)
    inner = {**given, "eps": given["eps"] / 6}
    assert whole.t == 2 * least(lambda x: theorem_3_3_holds(2 * x, 4, **inner))
    assert whole.delta == given["failure"] / (32 * max(1.0, given["n"] / whole.t))
    assert whole.slots == (whole.buckets + 1) * (whole.levels + 1) * whole.t


@settings(deadline=None)
@given(given=SIZES)
def test_buckets_are_those_that_line_9_leaves(given):
    """The buckets have 2^i above eps/(2n) e^(-rho) v_max and up to the bucket of v_max, whose 2^i
    is at most 2 v_max: i is in an interval of length log2(4n e^rho/eps), open below."""
    size = balancekv(**given)
    rho = given["r"] ** 2 / math.sqrt(given["d"])
    low = given["eps"] / (2 * given["n"]) * math.exp(-rho)
    most = 0
    for shift in range(8):  # v_max = 1 .. 2, all in bucket 1
        v_max = 2 ** (shift / 8)
        bottom = math.floor(math.log2(low * v_max)) + 1
        most = max(most, 1 - bottom + 1)
    assert min(most, given["n"]) <= size.buckets <= most + 1
    few = balancekv(**given, norm_ratio=5.0)
    assert few.buckets == min(size.buckets, 4)  # norms 1 .. 5 may lie in 4 buckets


def test_break_even_looks_at_every_interval():
    """Slots may be saved only in an interval of short streams: from 451 tokens on, three batches of
    150 slots are fewer than the tokens, and from 512 on a batch is 10,000."""

    def levels(n, t):
        return max(1, math.ceil(math.log2(n / t)))

    def size(n):
        t = 150 if n < 512 else 10_000
        return MergeAndReduceSize(t, levels(n, t), 0.01)

    assert break_even(size) == 451
    # (3 + 1) instances of 5 + 1 levels of 50
    assert break_even(lambda n: BalanceKVSize(50, levels(n, 50), 0.01, 3)) == 1201


# ---- Compression Barriers: few dimensions ----


def test_corollary_9_with_its_constants():
    for eps in (0.1, 0.3):
        found = barrier(10**6, 3000, eps)
        assert found.c_u == pytest.approx(12 / (eps * eps * (1 - eps)))
        assert found.rows == min(10**6, math.floor(math.exp(3000 / found.c_u)))
        scale = 2 * math.log(found.rows) / (1 - 2 * eps)
        assert found.query_norm**2 == pytest.approx(scale**2 * (1 + eps))
        assert found.bits == index_bits(found.rows * 3000)
    # 1 - H(1/3), H(1/3) = log2(3) - 2/3
    assert index_bits(300) == pytest.approx(300 * (5 / 3 - math.log2(3)))


def test_points_on_a_line_and_in_the_plane():
    """On a line at most 2 radius/delta points, rounded up, are more than delta apart; in the plane
    the bound is Oler's."""
    assert clusters_in_ball(1, 0.7) == 3  # -1, 0, 1
    assert clusters_in_ball(1, 0.5) == 4  # not 5: they are more than 0.5 apart
    ratio = 10.0
    oler = 2 / math.sqrt(3) * math.pi * ratio**2 + math.pi * ratio + 1
    assert clusters_in_ball(2, 0.1) == math.floor(oler)


def test_the_bound_on_a_half_sphere_is_an_integral():
    """For d = 5 the bound equals sums over fine rings of sin^(d - 1), not sin^d."""
    delta = math.e / 3
    cosine = 1 - delta**2 / 2
    reach = math.acos(math.sqrt(cosine))
    rings = (torch.arange(200_000).double() + 0.5) / 200_000

    def integral(f, end):
        return float(f(rings * end).mean()) * end

    area = integral(lambda a: a.sin() ** 4, math.pi / 2 + reach)
    weight = integral(lambda a: a.sin() ** 4 * (a.cos() - math.cos(reach)), reach)
    bound = (1 - cosine) / (2 * math.sqrt(cosine)) * area / weight
    assert clusters_in_ball(5, delta) == math.floor(bound)


def test_theorem_15_is_theorem_1_over_the_balls_clusters():
    delta = math.e / 3
    m = clusters_in_ball(3, delta)
    assert low_dimensional(0.5, 1.0, 3, 0.02) == subgen(0.5, delta, 1.0, 10**9, 3, 0.02, m)


# ---- norms, curves, hard instances ----


def test_norms_on_numbers_worked_by_hand():
    """With two keys of 0 the softmax is (1/2, 1/2), whose norm is 1/sqrt 2. V = diag(3, 4) has the
    operator norm 4 and the Frobenius norm 5."""
    keys = torch.zeros(1, 1, 2, 2)
    values = torch.diag(torch.tensor([3.0, 4.0]))[None, None]
    found = error_bounds(torch.ones(1, 1, 1, 2), keys, values)
    assert float(found.operator) == pytest.approx(4 / math.sqrt(2))
    assert float(found.frobenius) == pytest.approx(5 / math.sqrt(2))


def test_the_curve_of_keys_on_a_line():
    """Of the keys 0, 1 and 10 the greedy centers are any one first, then those farthest away."""
    keys = torch.tensor([0.0, 1.0, 10.0]).view(1, 1, 3, 1)
    curve = clusterability(keys)
    assert curve.lower[0, 0].tolist() == pytest.approx([10.0, 1.0, 0.0], abs=1e-6)
    assert curve.upper[0, 0].tolist() == pytest.approx([20.0, 2.0, 0.0], abs=1e-6)
    assert [int(curve.clusters(x)) for x in (20.1, 19.0, 2.1, 1.9)] == [1, 2, 2, 3]


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_index_games_stretch_and_threshold(eta):
    """C is 2 (ln n + ln((1 + eta)/(1 - eta)))/(1 - 2 eps), and the threshold is in the middle of
    the worst approximations of x/(1 + x) and 1/(1 + x) for x = n e^(-C (1 - 2 eps))."""
    bits = torch.ones(5, 3)
    game = index_game(bits, length=9, eps=0.2, eta=eta, d=4, strict=False)
    stretch = 2 * (math.log(9) + math.log((1 + eta) / (1 - eta))) / 0.6
    keys = game.slots.keys[0, 0, 4:]
    torch.testing.assert_close(game.queries[0, 0], stretch * keys)
    assert not bool(game.slots.keys[0, 0, :4].any())
    assert torch.equal(game.slots.values[0, 0, 4:], bits)
    x = 9 * math.exp(-stretch * 0.6)
    low, high = (1 + eta) * x / (1 + x), (1 - eta) / (1 + x)
    assert low < high
    assert game.threshold == pytest.approx((low + high) / 2)


@pytest.mark.parametrize("i", [0, 11, 12, 15])
def test_theorem_27s_outputs_are_attention(i):
    """For n = 16, equations 96 and 97 give the outputs of the softmax, with values of sqrt(n) in
    the last four rows."""
    pair = non_adaptive_pair(16, 3, i)
    assert pair.plain.values[0, 0, :, 0].tolist() == [1.0] * 12 + [4.0] * 4
    for slots, said in ((pair.planted, pair.planted_output), (pair.plain, pair.plain_output)):
        weight = torch.softmax(slots.keys[0, 0] @ pair.query[0, 0, 0], 0)
        assert float((weight @ slots.values[0, 0])[0]) == pytest.approx(said)
    # the planted key has weight 1 - 1/n
    weight = torch.softmax(pair.planted.keys[0, 0] @ pair.query[0, 0, 0], 0)
    assert float(weight[i]) == pytest.approx((15**2) / (15**2 + 15))
