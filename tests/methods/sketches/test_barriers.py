"""The algorithms of "Compression Barriers" are exact where they claim to be, and their samples have
the right distribution. Statistical tests have fixed seeds and significance 1e-3 each."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import InputError, Slots, attend
from kvsketch.methods.sketches.one_dimensional import OneDimensional
from kvsketch.methods.sketches.sliding_window import SlidingWindow, SlidingWindowSampled

ALPHA = 1e-3
BATCH, HEADS, GROUP, DIM = 2, 2, 3, 4
MAKERS = {
    "sliding_window": lambda seed=0: SlidingWindow(5, seed=seed),
    "sliding_window_sampled": lambda seed=0: SlidingWindowSampled(5, samples=3, seed=seed),
    "one_dimensional": lambda seed=0: OneDimensional(16, seed=seed),
}
every_sketch = pytest.mark.parametrize("kind", MAKERS)


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_tokens(seed, n, dim=DIM, dtype=torch.float64):
    shape = (BATCH, HEADS, n)
    return Slots(normal(seed, *shape, dim, dtype=dtype), normal(seed + 1, *shape, 3, dtype=dtype))


def numbered(keys, rows):
    """The tokens of one stream, for ``rows`` independent sketches in one batch; the value of
    token i is i."""
    keys = torch.as_tensor(keys, dtype=torch.float64).view(1, 1, -1, 1)
    index = torch.arange(keys.shape[2], dtype=torch.float64).view(1, 1, -1, 1)
    return Slots(keys.expand(rows, 1, -1, 1), index.expand(rows, 1, -1, 1))


def feed(sketch, tokens, chunks):
    start = 0
    for length in chunks:
        sketch.extend(tokens.narrow(start, length))
        start += length
    return sketch


def feed_merged(make, tokens, parts):
    """One sketch per part (each a list of chunks, with its own seed), merged from left to right."""
    whole, start = None, 0
    for seed, chunks in enumerate(parts):
        piece = tokens.narrow(start, sum(chunks))
        start += sum(chunks)
        sketch = feed(make(seed), piece, chunks)
        if whole is None:
            whole = sketch
        else:
            whole.merge(sketch)
    return whole


def same_bytes(first, second):
    assert first.state.keys() == second.state.keys()
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    assert torch.equal(first.generator.get_state(), second.generator.get_state())
    assert (first.seen, first.meta) == (second.seen, second.meta)


def check_counts(observed, expected):
    """Chi-square test of token numbers against their expected probabilities."""
    expected = torch.as_tensor(expected, dtype=torch.float64).flatten()
    counts = torch.bincount(observed.long().flatten(), minlength=len(expected)).double()
    assert float(expected.sum()) == pytest.approx(1)
    assert bool((counts[expected == 0] == 0).all())
    frequencies = (expected * counts.sum())[expected > 0]
    assert float(frequencies.min()) > 5  # enough for a chi-square test
    p = stats.chisquare(counts[expected > 0].numpy(), frequencies.numpy(), sum_check=False).pvalue
    assert p > ALPHA, p


# --- sliding window: the exact form ---------------------------------------------------------------


def equation_20(queries, tokens, live, window, scaling):
    """Attention as equation 20 defines it, one row, head and query at a time."""
    out = torch.zeros(*queries.shape[:3], tokens.values.shape[3], dtype=torch.float64)
    for b in range(queries.shape[0]):
        for head in range(queries.shape[1]):
            kv = head // (queries.shape[1] // tokens.keys.shape[1])
            keys = tokens.keys[b, kv][live[b, kv]].double()
            values = tokens.values[b, kv][live[b, kv]].double()
            if not len(keys):
                continue
            for i in range(queries.shape[2]):
                scores = keys @ queries[b, head, i].double() * scaling
                scores[: max(0, len(keys) - window)] *= 0
                out[b, head, i] = torch.softmax(scores, 0) @ values
    return out


lengths = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 999), parts=lengths, window=st.integers(1, 30), padding=st.booleans())
def test_exact_form_is_equation_20(seed, parts, window, padding):
    """The exact form equals equation 20 for all chunks, merges and padding, also with windows
    longer than the stream."""
    n = sum(map(sum, parts))
    tokens = random_tokens(seed, n)
    live = torch.ones(BATCH, HEADS, n, dtype=torch.bool)
    if padding:
        live = normal(seed + 2, BATCH, HEADS, n) > -0.3
        tokens = tokens.only(live)
    queries = 2 * normal(seed + 3, BATCH, HEADS * GROUP, 2, DIM)
    sketch = feed_merged(lambda seed: SlidingWindow(window, seed=seed), tokens, parts)
    out = attend(queries, sketch.slots, scaling=0.7)
    torch.testing.assert_close(out, equation_20(queries, tokens, live, window, 0.7))
    assert sketch.slots.count <= window + 1


def test_exact_form_draws_nothing():
    tokens = random_tokens(0, 40)
    sketches = [feed(SlidingWindow(5, seed=seed), tokens, [40]) for seed in range(3)]
    for seed, sketch in enumerate(sketches):
        assert torch.equal(sketch.slots.values, sketches[0].slots.values)
        fresh = torch.Generator().manual_seed(seed)
        assert torch.equal(sketch.generator.get_state(), fresh.get_state())


@pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_sampled"])
def test_window_memory_does_not_grow(kind):
    """The memory is O(dW), whatever the length of the stream (Theorem 24)."""
    short, long = (feed(MAKERS[kind](), random_tokens(0, n), [n]) for n in (20, 2000))
    assert short.nbytes() == long.nbytes()
    assert feed(MAKERS[kind](), random_tokens(0, 2), [2]).nbytes() < short.nbytes()


def test_bfloat16_values_are_summed_in_more():
    """Values are summed in float32; in bfloat16 a sum of ones would stop at 256."""
    n, window = 3000, 4
    ones = torch.ones(1, 1, n, 1, dtype=torch.bfloat16)
    sketch = feed(SlidingWindow(window), Slots(ones, ones), [1000] + [1] * 500 + [1500])
    assert sketch.slots.values.dtype == torch.float32
    assert float(sketch.slots.values[0, 0, -1]) == n - window
    for make in MAKERS.values():
        dim = 1 if make is MAKERS["one_dimensional"] else DIM
        tokens = random_tokens(0, 8, dim=dim, dtype=torch.bfloat16)
        queries = normal(1, BATCH, HEADS, 1, dim, dtype=torch.bfloat16)
        sketch = feed(make(), tokens, [3, 5])
        assert torch.isfinite(attend(queries, sketch.slots)).all()
        assert sketch.state.get("window.keys", tokens.keys).dtype == torch.bfloat16
        if not isinstance(sketch, SlidingWindow) or isinstance(sketch, SlidingWindowSampled):
            assert sketch.sample(queries, 2).dtype == torch.bfloat16
            assert sketch.estimate(queries, 1).dtype == torch.bfloat16


# --- sliding window: Algorithm 1 ------------------------------------------------------------------


def algorithm_1(n, window, generator):
    """Lines 8 to 13, one token at a time: the number of the sampled token after every step."""
    sample, history = -1, []
    for i in range(window + 1, n + 1):
        if float(torch.rand((), generator=generator)) < 1 / (i - window):
            sample = i - window - 1
        history.append(sample)
    return history


def reservoirs(rows, parts, window=2, n=None, live=None):
    tokens = numbered(torch.zeros(n or sum(map(sum, parts))), rows)
    if live is not None:
        tokens = tokens.only(live)
    sketch = feed_merged(
        lambda seed: SlidingWindowSampled(window, samples=2, seed=seed), tokens, parts
    )
    return sketch.state["reservoir"][:, 0, :, 0]


@pytest.mark.parametrize(
    "parts",
    [
        [[1] * 9],
        [[9]],
        [[3, 1, 5]],
        [[4], [5]],
        [[1, 1], [4, 3]],  # no token of the first sketch is outside its window
        [[5, 2], [1], [1]],  # nor is one of the later sketches
        [[1, 3], [3], [2]],
    ],
    ids=str,
)
def test_reservoirs_are_uniform_and_independent(parts):
    """Over 6,000 sketches the 49 pairs that two samples of the 7 tokens outside the window can form
    are equally likely (chi-square test)."""
    first, second = reservoirs(6000, parts).long().unbind(-1)
    check_counts(first * 7 + second, torch.full((49,), 1 / 49))


def test_padding_is_never_sampled():
    """In rows with different padding, samples are uniform over the row's own tokens outside its own
    window."""
    rows, n = 3000, 12
    live = torch.ones(2 * rows, 1, n, dtype=torch.bool)
    live[:rows, :, [0, 3, 4, 8, 11]] = False  # leaves 1 2 5 6 7 | 9 10
    drawn = reservoirs(2 * rows, [[4, 1], [4, 3]], n=n, live=live)
    expected = torch.zeros(n)
    expected[[1, 2, 5, 6, 7]] = 1 / 5
    check_counts(drawn[:rows], expected)
    check_counts(drawn[rows:], torch.tensor([0.1] * 10 + [0.0] * 2))


def test_chunks_have_the_law_of_algorithm_1_over_time():
    """The samples after 6 and after 9 tokens have the joint distribution of the reference loop
    (chi-square test of homogeneity)."""
    window, rows = 2, 3000
    generator = torch.Generator().manual_seed(5)
    reference = torch.zeros(4, 7)
    for _ in range(rows):
        history = algorithm_1(9, window, generator)
        reference[history[3], history[6]] += 1
    tokens = numbered(torch.zeros(9), rows)
    sketch = SlidingWindowSampled(window)
    sketch.extend(tokens.narrow(0, 6))
    early = sketch.state["reservoir"].flatten().long()
    sketch.extend(tokens.narrow(6, 3))
    late = sketch.state["reservoir"].flatten().long()
    ours = torch.bincount(early * 7 + late, minlength=28).view(4, 7).float()
    table = torch.stack([reference.flatten(), ours.flatten()])
    possible = table.sum(0) > 0
    assert torch.equal(possible.view(4, 7), reference > 0)
    assert stats.chi2_contingency(table[:, possible].numpy()).pvalue > ALPHA


def test_theorem_24_the_law_of_one_draw():
    """Over sketches and draws, every token is drawn with its probability in equation 20."""
    rows, n, window = 20000, 12, 4
    keys = normal(3, n)
    sketch = feed(SlidingWindowSampled(window), numbered(keys, rows), [7, 5])
    for q in (1.5, -0.5):
        scores = q * 0.8 * keys
        scores[:-window] = 0
        queries = torch.full((rows, 1, 1, 1), q, dtype=torch.float64)
        check_counts(sketch.sample(queries, scaling=0.8), scores.softmax(0))


def test_draws_average_to_attention_over_the_slots():
    """Given the reservoirs, over which draws cycle, the mean of draws is attention over the slots,
    for every query head (z-test)."""
    tokens = random_tokens(0, 30)
    queries = normal(1, BATCH, HEADS * GROUP, 2, DIM)
    sketch = feed(SlidingWindowSampled(5, samples=3), tokens, [30])
    drawn = sketch.sample(queries, 9000)
    expected = attend(queries, sketch.slots)
    z = (drawn.mean(0) - expected) / (drawn.std(0) / 9000**0.5)
    bound = stats.norm.isf(ALPHA / 2 / z.numel())  # Bonferroni
    assert float(z.abs().max()) < bound
    # the default of ``scaling`` is that of ``attend``
    other = attend(queries, sketch.slots, scaling=1.0)
    assert float(((other - expected).abs() / (drawn.std(0) / 9000**0.5)).max()) > bound


def test_line_6_is_exact_while_nothing_is_outside():
    tokens = random_tokens(0, 6)
    live = torch.ones(BATCH, 1, 6, dtype=torch.bool)
    live[0, :, 0] = False  # row 0 has 5 tokens, the whole window; row 1 has one outside it
    sketch = feed(SlidingWindowSampled(5, samples=2), tokens.only(live), [2, 4])
    queries = normal(1, BATCH, HEADS * GROUP, 2, DIM)
    drawn = sketch.sample(queries, 4)
    exact = equation_20(queries, tokens, live.expand(BATCH, HEADS, 6), 5, DIM**-0.5)
    torch.testing.assert_close(drawn[:, 0], exact[0].expand(4, -1, -1, -1))
    distance = drawn[:, 1, :, :, None] - tokens.values[1].repeat_interleave(GROUP, 0)[:, None]
    assert bool((distance.abs().amax(-1).amin(-1) == 0).all())  # every draw is a token's value


def binary_problem(rows, n=60, window=6, mean=0.3):
    """Tokens with values 0 and 1, queries that attend mostly outside the window, so that the
    variance is close to E[O], and the exact outputs."""
    keys, queries = normal(0, rows, 1, n, 1), torch.ones(rows, 1, 1, 1, dtype=torch.float64)
    values = (torch.arange(n) % 10 < 10 * mean).double().view(1, 1, n, 1).expand(rows, 1, n, 1)
    tokens = Slots(keys, values)
    live = torch.ones(rows, 1, n, dtype=torch.bool)
    return tokens, queries, equation_20(queries, tokens, live, window, 1.0)


def test_theorem_25_chebyshev_step():
    """A mean of T = 3 Var / (eps E)^2 draws is off by eps E at most a third of the time (equation
    65, one-sided binomial test), and some means are."""
    rows, groups, eps = 60, 21, 0.5
    tokens, queries, exact = binary_problem(rows)
    variance = exact * (1 - exact)
    count = math.ceil(float((3 * variance / (eps * exact) ** 2).max()))
    sketch = feed(SlidingWindowSampled(6, samples=count * groups), tokens, [50, 10])
    drawn = sketch.sample(queries, sketch.samples, scaling=1.0)
    means = drawn.view(groups, count, rows).mean(1)
    off = int(((means - exact.flatten()).abs() >= eps * exact.flatten()).sum())
    assert stats.binomtest(off, means.numel(), 1 / 3, alternative="greater").pvalue > ALPHA
    assert off > 0


def test_theorem_25_guarantee():
    """At the paper's T and Q (with the repaired e^(-Q/36)), |error| > eps E has a probability of at
    most delta."""
    rows, eps, delta = 30, 0.5, 0.1
    tokens, queries, exact = binary_problem(rows)
    count = math.ceil(3 / (eps**2 * float(exact.min())))  # ||V||_inf = 1
    groups = math.ceil(36 * math.log(2 / delta))
    sketch = feed(SlidingWindowSampled(6, samples=count * groups), tokens, [60])
    off = (sketch.estimate(queries, groups, scaling=1.0) - exact).abs() > eps * exact
    assert stats.binomtest(int(off.sum()), rows, delta, alternative="greater").pvalue > ALPHA


def test_estimate_is_the_median_of_means():
    sketch = feed(SlidingWindowSampled(4, samples=15), random_tokens(0, 40), [40])
    queries = normal(1, BATCH, HEADS * GROUP, 2, DIM)
    drawn = copy.deepcopy(sketch).sample(queries, 15)
    means = torch.stack([drawn[i : i + 3].mean(0) for i in range(0, 15, 3)])
    expected = means.sort(0).values[2]
    torch.testing.assert_close(sketch.estimate(queries, 5), expected)
    with pytest.raises(InputError, match="groups=4 must divide samples=15"):
        sketch.estimate(queries, 4)


def test_repairs_to_the_proof_of_theorem_25():
    """Pr[Bin(Q, 1/3) >= Q/2] exceeds the printed bound e^(-Q/12) for Q = 100, and neither e^(-Q/18)
    nor e^(-Q/36) for any Q below 400."""
    tail = {q: stats.binom.sf(math.ceil(q / 2) - 1, q, 1 / 3) for q in range(1, 400)}
    assert tail[100] > math.exp(-100 / 12)
    assert all(p <= math.exp(-q / 18) <= math.exp(-q / 36) for q, p in tail.items())


# --- one dimension: Appendix E --------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    parts=lengths,
    k=st.integers(1, 6),
    reservoir=st.integers(1, 12),
    padding=st.booleans(),
)
def test_extremes_are_true_and_the_reservoir_is_of_the_rest(seed, parts, k, reservoir, padding):
    n = sum(map(sum, parts))
    # values are the numbers of the tokens, which distinguish tokens with equal keys
    keys = (4 * normal(seed, BATCH, HEADS, n, 1)).round()
    index = torch.arange(1, n + 1, dtype=torch.float64).view(1, 1, n, 1)
    tokens = Slots(keys, index.expand(BATCH, HEADS, n, 1))
    live = torch.ones(BATCH, HEADS, n, dtype=torch.bool)
    if padding:
        live = normal(seed + 1, BATCH, HEADS, n) > -0.3
        tokens = tokens.only(live)
    sketch = feed_merged(
        lambda seed: OneDimensional(buffer=k, reservoir=reservoir, seed=seed), tokens, parts
    )
    slots, exact = sketch.slots, []
    for b in range(BATCH):
        for h in range(HEADS):
            own, mass = live[b, h], slots.mass[b, h]
            alive = mass > 0
            number = (slots.values[b, h, :, 0] / mass.where(alive, 1.0))[alive].round().long() - 1
            assert len(number) == len(set(number.tolist()))  # no token twice
            assert bool(own[number].all())  # no padding
            assert torch.equal(slots.keys[b, h, alive, 0], keys[b, h, number, 0])
            assert float(mass.sum()) == pytest.approx(int(own.sum()))
            is_end = torch.arange(slots.count)[alive] < sketch.state["ends.keys"].shape[2]
            ends = slots.keys[b, h, alive, 0][is_end].sort().values
            full = keys[b, h, own, 0].sort().values
            rest = max(0, len(full) - 2 * k)
            assert torch.equal(ends, torch.cat([full[:k], full[-k:]]) if rest else full)
            assert bool((mass[alive][is_end] == 1).all())
            assert int((~is_end).sum()) == min(rest, reservoir)
            exact.append(rest <= reservoir)
    if all(exact):
        queries = normal(seed + 2, BATCH, HEADS, 3, 1)
        whole = Slots(tokens.keys, tokens.values, live.double())
        torch.testing.assert_close(attend(queries, slots), attend(queries, whole))


@pytest.mark.parametrize(
    "parts", [[[10]], [[1] * 10], [[4, 1, 5]], [[5], [5]], [[9], [1]], [[2, 6], [1], [1]]], ids=str
)
def test_reservoir_is_a_uniform_subset_of_the_rest(parts):
    """Over 6,000 sketches all 15 pairs of the 6 tokens between the extremes are equally likely
    (chi-square test)."""
    rows, keys = 6000, [5, -1, 9, 0.5, -7, 2, 1, 8, -2, -9]  # tokens 2 7 | 4 9 are the extremes
    sketch = feed_merged(
        lambda seed: OneDimensional(buffer=2, reservoir=2, seed=seed), numbered(keys, rows), parts
    )
    low, high = sketch.state["rest.values"][:, 0, :, 0].sort(-1).values.long().unbind(-1)
    expected = torch.zeros(10, 10)
    rest = [0, 1, 3, 5, 6, 8]
    for i, a in enumerate(rest):
        expected[a, rest[i + 1 :]] = 1 / 15
    check_counts(low * 10 + high, expected)


@pytest.mark.parametrize("q", [1.2, -1.2, 0.0])
@pytest.mark.parametrize("parts", [[[25, 15]], [[20], [20]]], ids=["whole", "merged"])
def test_lazy_gumbel_law_is_softmax(q, parts):
    """Over 10,000 sketches that draw once, each of 40 tokens has its probability in the softmax
    (chi-square test). The reservoir has 26 of the 28 tokens between the extremes and never falls
    short here, so that the distribution is exact."""
    rows, keys = 10000, normal(7, 40)
    sketch = feed_merged(
        lambda seed: OneDimensional(buffer=6, reservoir=26, seed=seed), numbered(keys, rows), parts
    )
    drawn = sketch.sample(torch.full((rows, 1, 1, 1), q, dtype=torch.float64))
    assert sketch.shortfalls == 0
    assert sketch.state["rest.keys"].shape[2] == 26
    check_counts(drawn, (q * keys).softmax(0))


def test_lazy_gumbel_in_groups_given_the_reservoir():
    """If all tokens are kept, the mean of draws is attention, for every query head and with a
    ``scaling`` (z-test)."""
    tokens, queries = random_tokens(0, 12, dim=1), normal(1, BATCH, HEADS * GROUP, 2, 1)
    sketch = feed(OneDimensional(buffer=2, reservoir=8), tokens, [12])
    drawn = copy.deepcopy(sketch).sample(queries, 8000, scaling=2.0)
    expected = attend(queries, tokens, scaling=2.0)
    z = (drawn.mean(0) - expected) / (drawn.std(0) / 8000**0.5)
    assert float(z.abs().max()) < stats.norm.isf(ALPHA / 2 / z.numel())
    torch.testing.assert_close(sketch.estimate(queries, 8000, scaling=2.0), drawn.mean(0))
    assert sketch.shortfalls == 0


def test_lazy_gumbel_law_with_padding():
    """Tokens are drawn by softmax in rows with all tokens, with a rest smaller than the reservoir,
    and with fewer tokens than the two buffers have room for. Padding is never drawn."""
    rows, n = 4000, 20
    keys = 0.7 * normal(8, n)
    live = torch.ones(3, n, dtype=torch.bool)
    live[1, [0, 2, 5, 6, 11, 19]] = False
    live[2, :] = normal(9, n) > 0.4
    live[2, 0] = False
    assert 3 < int(live[2].sum()) < 8
    tokens = numbered(keys, 3 * rows).only(live.repeat_interleave(rows, 0).unsqueeze(1))
    sketch = feed(OneDimensional(buffer=4, reservoir=11), tokens, [11, 9])
    drawn = sketch.sample(torch.ones(3 * rows, 1, 1, 1, dtype=torch.float64))
    assert sketch.shortfalls == 0
    for kind, part in enumerate(drawn.view(3, rows)):
        check_counts(part, keys.masked_fill(~live[kind], -torch.inf).softmax(0))


@pytest.mark.parametrize(("spread", "reservoir"), [(0.0, 20), (1.0, 20), (1.0, 3)])
def test_draws_fall_short_as_often_as_computed(spread, reservoir):
    """With k keys at each of +-spread and the others 0, Pr[m > R] is the product of
    (N - i) / (N - i + a) over i = 0..R, where a is the sum of exp(score - S_min) over the extremes.
    It is within the docstring's bound, and above a tenth for R up to sqrt n. As all scores of the
    rest are equal, tokens are drawn by softmax even if a draw falls short."""
    rows, n, k = 2500, 400, 20
    keys = torch.cat([torch.full((k,), spread), torch.zeros(n - 2 * k), torch.full((k,), -spread)])
    sketch = feed(OneDimensional(n, reservoir=reservoir), numbered(keys, rows), [150, 250])
    drawn = sketch.sample(torch.ones(rows, 1, 4, 1, dtype=torch.float64))
    rest, held = n - 2 * k, k * (1 + math.exp(-2 * spread))
    chance = math.prod((rest - i) / (rest - i + held) for i in range(reservoir + 1))
    assert chance < (rest / (rest + k)) ** (reservoir + 1)
    assert chance > 0.1
    law = keys.double().softmax(0).view(40, 10).sum(-1)
    for query in range(4):  # one test for each, as the four share a reservoir
        check_counts(drawn[:, :, :, query] // 10, law)
    # whether a draw falls short does not depend on what is in the reservoir
    assert stats.binomtest(sketch.shortfalls, 4 * rows, chance).pvalue > ALPHA


def test_a_reservoir_with_the_logarithm_does_not():
    n, rows = 400, 4000
    sketch = feed(OneDimensional(n, reservoir=140), numbered(torch.zeros(n), rows), [n])
    sketch.sample(torch.ones(rows, 1, 1, 1, dtype=torch.float64))
    delta = math.exp(-140 / 20)  # R = sqrt(n) ln(1 / delta)
    p = stats.binomtest(sketch.shortfalls, rows, delta, alternative="greater").pvalue
    assert p > ALPHA


def test_memory_is_the_square_root():
    lengths, bytes_held = [1 << 10, 1 << 13, 1 << 16], []
    for n in lengths:
        tokens = Slots(normal(0, 1, 1, n, 1), normal(1, 1, 1, n, 1))
        bytes_held.append(feed(OneDimensional(n), tokens, [n // 4] * 4).nbytes())
    slope = stats.linregress([math.log(n) for n in lengths], [math.log(b) for b in bytes_held])
    assert 0.45 < slope.slope < 0.55
    few = Slots(normal(0, 1, 1, 3, 1), normal(1, 1, 1, 3, 1))
    assert feed(OneDimensional(), few, [3]).nbytes() < 100  # nothing is reserved in advance


def test_only_scalar_keys():
    sketch = OneDimensional(9)
    with pytest.raises(InputError, match="head_dim=4 must be 1"):
        sketch.extend(random_tokens(0, 5))
    assert not sketch.state
    assert feed(sketch, random_tokens(0, 5, dim=1), [5]).slots.count == 5


# --- all three ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sliding_window_sampled", "one_dimensional"])
def test_merged_halves_err_as_the_whole(kind):
    """The errors of 2,000 merged and 2,000 single sketches have the same distribution (two-sample
    Kolmogorov-Smirnov test)."""
    rows, n = 2000, 80
    tokens = numbered(normal(0, n), rows)
    queries = torch.full((rows, 1, 1, 1), 0.8, dtype=torch.float64)
    window = torch.arange(n) >= n - 5 if kind != "one_dimensional" else torch.ones(n)
    weights = (0.8 * tokens.keys[0, 0, :, 0] * window).softmax(0)
    exact = (weights * torch.arange(n)).sum()
    make = MAKERS[kind]
    errors = [
        (attend(queries, feed_merged(make, tokens, parts).slots) - exact).flatten().numpy()
        for parts in ([[30, 50]], [[13, 27], [40]])
    ]
    assert errors[0].std() > 0
    assert stats.ks_2samp(*errors).pvalue > ALPHA


@every_sketch
def test_same_seed_same_bytes(kind):
    dim = 1 if kind == "one_dimensional" else DIM
    tokens = random_tokens(0, 50, dim=dim)
    runs = [feed(MAKERS[kind](seed), tokens, [20, 1, 29]) for seed in (7, 7, 8)]
    same_bytes(runs[0], runs[1])
    if kind != "sliding_window":
        assert not torch.equal(runs[0].slots.values, runs[2].slots.values)


@every_sketch
def test_saved_sketch_continues_with_the_same_bytes(kind, tmp_path):
    dim = 1 if kind == "one_dimensional" else DIM
    tokens, queries = random_tokens(0, 60, dim=dim), normal(1, BATCH, HEADS, 1, dim)
    sketch = feed(MAKERS[kind](3), tokens, [2, 38])
    sketch.save(tmp_path / "sketch")
    loaded = type(sketch).load(tmp_path / "sketch")
    same_bytes(sketch, loaded)
    for one in (sketch, loaded):
        if kind != "sliding_window":
            one.sample(queries, 2)
        one.extend(tokens.narrow(40, 20))
        one.merge(feed(MAKERS[kind](9), tokens, [30]))
    same_bytes(sketch, loaded)
    few = feed(MAKERS[kind](), tokens, [2])  # parts may still be empty
    few.save(tmp_path / "few")
    same_bytes(few, type(few).load(tmp_path / "few"))


@every_sketch
def test_broken_files_are_refused_and_harm_nothing(kind, tmp_path):
    dim = 1 if kind == "one_dimensional" else DIM
    sketch = feed(MAKERS[kind](), random_tokens(0, 30, dim=dim), [30])
    path = tmp_path / "sketch"
    sketch.save(path)
    (tmp_path / "half").write_bytes(path.read_bytes()[:-9])
    (tmp_path / "foreign").write_bytes(b"not a sketch at all")
    for name in ("half", "foreign", "missing"):
        with pytest.raises(InputError, match=name):
            type(sketch).load(tmp_path / name)
    other = OneDimensional if kind != "one_dimensional" else SlidingWindow
    with pytest.raises(InputError, match=kind):
        other.load(path)
    same_bytes(sketch, type(sketch).load(path))


@every_sketch
def test_refused_input_changes_nothing(kind):
    dim = 1 if kind == "one_dimensional" else DIM
    sketch = feed(MAKERS[kind](), random_tokens(0, 30, dim=dim), [30])
    before = copy.deepcopy(sketch)
    bad = random_tokens(1, 4, dim=dim)
    bad.values[1, 1, 2, 0] = float("nan")
    with pytest.raises(InputError, match="values are not finite"):
        sketch.extend(bad)
    with pytest.raises(InputError, match="do not fit"):
        sketch.extend(random_tokens(1, 4, dim=dim + 1))
    with pytest.raises(InputError, match="differs"):
        sketch.merge(type(sketch).for_budget(50))
    same_bytes(sketch, before)


@every_sketch
def test_sketch_owns_its_tensors(kind):
    dim = 1 if kind == "one_dimensional" else DIM
    tokens = random_tokens(0, 4, dim=dim)
    sketch, twin = (feed(MAKERS[kind](), tokens, [4]) for _ in range(2))
    other = feed(MAKERS[kind](5), tokens, [4])
    copied = copy.deepcopy(other)
    twin.merge(other)
    same_bytes(other, copied)
    expected = sketch.slots.values.clone()
    tokens.values.zero_()
    assert torch.equal(sketch.slots.values, expected)


def test_positions_come_along():
    """Kept tokens keep their positions for ALiBi, and the slot of the tokens outside has 0."""
    tokens = random_tokens(0, 12, dim=1)
    position = torch.arange(12.0).expand(BATCH, HEADS, 12)
    tokens = Slots(tokens.keys, tokens.values, positions=position)
    window = feed(SlidingWindow(5), tokens, [7, 5]).slots.positions
    assert window[0, 0].tolist() == [7, 8, 9, 10, 11, 0]
    queries, slopes = normal(1, BATCH, HEADS, 2, 1), torch.tensor([0.5, 0.25])
    held = feed(OneDimensional(buffer=2, reservoir=8), tokens, [7, 5]).slots
    expected = attend(queries, tokens, slopes=slopes)
    torch.testing.assert_close(attend(queries, held, slopes=slopes), expected)


def test_budgets():
    tokens = random_tokens(0, 100, dim=1)
    for cls in (SlidingWindow, SlidingWindowSampled, OneDimensional):
        assert feed(cls.for_budget(20), tokens, [100]).slots.count == 20
    sampled = SlidingWindowSampled.for_budget(20, seed=3, samples=6)
    assert (sampled.window, sampled.samples, sampled.seed) == (14, 6, 3)
    assert OneDimensional(max_tokens=101).buffer == 11
    assert OneDimensional(max_tokens=100).reservoir == 10


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SlidingWindow(0), "window=0 must be an int >= 1"),
        (lambda: SlidingWindow(2.5), r"window=2\.5"),
        (lambda: SlidingWindow.for_budget(1), "slots=1 must be an int >= 2"),
        (lambda: SlidingWindowSampled(4, samples=0), "samples=0 must be an int >= 1"),
        (lambda: SlidingWindowSampled(-1), "window=-1"),
        (lambda: SlidingWindowSampled.for_budget(4, samples=4), "slots=4 must be an int >= 5"),
        (lambda: OneDimensional(0), "max_tokens=0"),
        (lambda: OneDimensional(buffer=0), "buffer=0"),
        (lambda: OneDimensional(reservoir=True), "reservoir=True"),
        (lambda: OneDimensional.for_budget(2), "slots=2 must be an int >= 3"),
        (lambda: SlidingWindow(3).slots, "empty"),
        (lambda: SlidingWindowSampled(3).sample(torch.zeros(1, 1, 1, 1)), "empty"),
        (lambda: OneDimensional().sample(torch.zeros(1, 1, 1, 1)), "empty"),
        (
            lambda: feed(OneDimensional(), random_tokens(0, 3, dim=1), [3]).sample(
                torch.zeros(BATCH, HEADS + 1, 1, 1)
            ),
            "num_attention_heads=3",
        ),
        (
            lambda: feed(SlidingWindowSampled(3), random_tokens(0, 3), [3]).sample(
                torch.zeros(BATCH, HEADS, 1, DIM), draws=0
            ),
            "draws=0",
        ),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(InputError, match=message):
        build()
