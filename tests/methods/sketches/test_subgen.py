"""SubGen (ClusterGen), Algorithm 1: Lemmas 1 and 2, the distributions of the samples, and chunks
that equal the printed loop."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsketch import InputError, Slots, attend
from kvsketch.methods.sketches import SubGen, SubGenCoupled
from kvsketch.methods.sketches.online_clusters import assign, within_cluster
from kvsketch.theory import error_bounds, low_dimensional, measured_error

SIGNIFICANCE = 1e-3


def tokens(seed, n, heads=2, dim=3, batch=1, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, dim)
    keys = spread * torch.randn(shape, generator=g)
    return Slots(keys, torch.randn(shape, generator=g))


def feed(sketch, slots, cuts=()):
    """Extend with the parts of a stream between the cuts."""
    edges = sorted({0, slots.count, *(c % (slots.count + 1) for c in cuts)})
    for start, stop in itertools.pairwise(edges):
        sketch.extend(slots.narrow(start, stop - start))
    return sketch


def cluster_loop(keys, delta):
    """UpdateSoftmaxNormalizer's clustering, one key at a time, in float64."""
    centers, assigned = [], []
    for key in keys.double():
        if centers:
            distance = torch.stack([(key - c).norm() for c in centers])
            nearest = int(distance.argmin())
            if float(distance[nearest]) <= delta:
                assigned.append(nearest)
                continue
        centers.append(key)
        assigned.append(len(centers) - 1)
    return centers, assigned


class Loop:
    """Algorithm 1 as printed, one token at a time, one head: the reference for the chunked form."""

    def __init__(self, delta, s, t, seed):
        self.delta, self.s, self.t, self.mu = delta, s, t, 0.0
        self.clusters, self.samples = [], [None] * s
        self.generator = torch.Generator().manual_seed(seed)

    def coin(self, p):
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < p

    def update(self, key, value):
        nearest = None
        if self.clusters:
            distance = [float((key - x).norm()) for x, _, _ in self.clusters]
            nearest = min(range(len(distance)), key=distance.__getitem__)
        if nearest is not None and distance[nearest] <= self.delta:
            cluster = self.clusters[nearest]
            cluster[2] += 1
            for j in range(self.t):
                if self.coin(1 / cluster[2]):
                    cluster[1][j] = key
        else:
            self.clusters.append([key, [key] * self.t, 1])
        weight = float(value.square().sum())
        for i in range(self.s):
            if self.mu + weight > 0 and self.coin(weight / (self.mu + weight)):
                self.samples[i] = (key, value)
        self.mu += weight

    def query(self, q):
        z = sum(
            self.mu / (self.s * v.square().sum()) * torch.exp(q @ k) * v
            for k, v in (sample for sample in self.samples)
        )
        tau = sum(n / self.t * torch.exp(torch.stack(ks) @ q).sum() for _, ks, n in self.clusters)
        return z / tau


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(1, 60),
    delta=st.floats(0.05, 4.0),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_lemma_2_invariants_and_the_clusters_of_the_loop(seed, n, delta, cuts):
    """The representatives, their number and the counts n_i are those of the loop, whatever the
    chunks (invariants 1 and 2); keys lie within delta (3) and representatives apart (4); every
    sample is a member of its cluster (5; the next test shows that it is uniform)."""
    slots = tokens(seed, n)
    sketch = feed(SubGen(delta, s=1, t=3), slots, cuts)
    for head in range(2):
        keys = slots.keys[0, head]
        centers, assigned = cluster_loop(keys, delta)
        m = len(centers)
        assert int(sketch.clusters[0, head]) == m
        counts = sketch.state["count"][0, head, :m]
        assert counts.tolist() == torch.bincount(torch.tensor(assigned), minlength=m).tolist()
        found = sketch.state["center"][0, head, :m] + sketch.state["origin"][0, head]
        torch.testing.assert_close(found.double(), torch.stack(centers), atol=1e-5, rtol=1e-5)
        own = torch.stack([centers[a] for a in assigned])
        assert bool(((keys.double() - own).norm(dim=-1) <= delta).all())
        if m > 1:
            assert float(torch.pdist(torch.stack(centers)).min()) > delta
        samples = sketch.get("cluster").keys[0, head].view(-1, 3, keys.shape[1])[:m]
        for i in range(m):
            members = keys[torch.tensor(assigned) == i]
            match = (samples[i].unsqueeze(1) == members.unsqueeze(0)).all(-1)
            assert bool(match.any(1).all())


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (7,), tuple(range(24))])
@pytest.mark.parametrize("merged", [False, True])
def test_cluster_samples_are_uniform_and_independent(cuts, merged):
    """Over 4,000 heads the members of a cluster are sampled equally often, and so are pairs of them
    (Lemma 2 (5), chi-square tests), for all chunks and for merged sketches."""
    heads, n = 4000, 24
    place = torch.arange(n, dtype=torch.float32)
    keys = (place % 2 * 100 + place / n).view(1, 1, n, 1).expand(1, heads, n, 1)  # two clusters
    slots = Slots(keys, torch.ones_like(keys))
    if merged:
        sketch = feed(SubGen(10.0, s=1, t=2, seed=1), slots.narrow(0, 9), cuts)
        sketch.merge(feed(SubGen(10.0, s=1, t=2, seed=2), slots.narrow(9, 15), cuts))
    else:
        sketch = feed(SubGen(10.0, s=1, t=2, seed=3), slots, cuts)
    assert sketch.clusters.unique().tolist() == [2]
    drawn = sketch.get("cluster").keys.view(heads, -1, 2)[:, :2]
    index = ((drawn % 100) * n).round().long() // 2
    for i in range(2):
        counts = torch.bincount(index[:, i].flatten(), minlength=n // 2)
        assert stats.chisquare(counts).pvalue > SIGNIFICANCE
        pairs = torch.bincount(index[:, i, 0] * (n // 2) + index[:, i, 1], minlength=(n // 2) ** 2)
        assert stats.chisquare(pairs).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 7), tuple(range(20))])
@pytest.mark.parametrize("merged", [False, True])
def test_lemma_1_numerator_samples(cuts, merged):
    """Lemma 1: mu is the sum of |v|^2, and each sample is token i with probability |v_i|^2 / mu
    (chi-square), independently of the others; values of norm 0 are never drawn."""
    heads, n = 4000, 20
    place = torch.arange(n, dtype=torch.float32).view(1, 1, n, 1)
    values = torch.where(place % 5 == 0, 0.0, 1 + place / 7)
    slots = Slots(place.expand(1, heads, n, 1), values.expand(1, heads, n, 1))
    if merged:
        sketch = feed(SubGen(1e9, s=2, t=1, seed=1), slots.narrow(0, 8), cuts)
        sketch.merge(feed(SubGen(1e9, s=2, t=1, seed=2), slots.narrow(8, 12), cuts))
    else:
        sketch = feed(SubGen(1e9, s=2, t=1, seed=3), slots, cuts)
    weight = values.flatten().double().square()
    torch.testing.assert_close(sketch.state["mu"], weight.sum().expand(1, heads))
    drawn = sketch.get("sample").keys.view(heads, 2).long()
    live = weight > 0
    for j in range(2):
        counts = torch.bincount(drawn[:, j], minlength=n)
        assert counts[~live].sum() == 0
        expected = heads * weight[live] / weight.sum()
        assert stats.chisquare(counts[live], expected).pvalue > SIGNIFICANCE
    joint = torch.bincount(drawn[:, 0] * n + drawn[:, 1], minlength=n * n).view(n, n)[live][:, live]
    table = joint.numpy()
    assert stats.chi2_contingency(table + 0.0).pvalue > SIGNIFICANCE


def test_outputs_have_the_distribution_of_the_loop():
    """Outputs of chunks and of the printed loop, 300 runs each, have the same distribution
    (Kolmogorov-Smirnov test)."""
    runs, n, dim = 300, 25, 3
    slots = tokens(5, n, heads=1, dim=dim)
    keys, values = slots.keys[0, 0], slots.values[0, 0]
    query = torch.tensor([0.4, -0.3, 0.5])
    by_loop = []
    for run in range(runs):
        loop = Loop(1.0, s=4, t=2, seed=run)
        for key, value in zip(keys, values, strict=True):
            loop.update(key, value)
        by_loop.append(loop.query(query))
    many = slots.map(lambda x: x.expand(1, runs, *x.shape[2:]).contiguous())
    sketch = feed(SubGen(1.0, s=4, t=2, seed=11), many, cuts=(4, 15))
    queries = query.expand(1, runs, 1, dim)
    chunked = attend(queries, sketch.slots, scaling=1.0)[0, :, 0]
    for column in range(dim):
        a = torch.stack(by_loop)[:, column]
        assert stats.ks_2samp(a.numpy(), chunked[:, column].numpy()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("cls", [SubGen, SubGenCoupled])
def test_merged_halves_err_like_one_sketch(cls):
    """The errors of 1,500 merged pairs and of 1,500 single sketches have the same distribution
    (Kolmogorov-Smirnov test)."""
    heads, n = 1500, 120
    g = torch.Generator().manual_seed(0)
    centers = 4 * torch.randn(6, 4, generator=g)
    keys = centers[torch.arange(n) % 6] + 0.2 * torch.randn(n, 4, generator=g)
    slots = Slots(
        keys.expand(1, heads, n, 4).contiguous(),
        torch.randn(n, 4, generator=g).expand(1, heads, n, 4).contiguous(),
    )
    queries = (0.3 * torch.randn(4, generator=g)).expand(1, heads, 1, 4)
    exact = attend(queries, slots)
    options = {"delta": 2.0, "t": 3, **({"s": 16} if cls is SubGen else {})}
    whole = feed(cls(**options, seed=1), slots)
    left = feed(cls(**options, seed=2), slots.narrow(0, 50))
    left.merge(feed(cls(**options, seed=3), slots.narrow(50, 70)))
    errors = [(attend(queries, s.slots) - exact).norm(dim=-1).flatten() for s in (whole, left)]
    assert stats.ks_2samp(*(e.numpy() for e in errors)).pvalue > SIGNIFICANCE
    assert left.seen == whole.seen == n
    torch.testing.assert_close(left.slots.masses().sum(-1), whole.slots.masses().sum(-1))


def test_numerator_and_denominator_are_unbiased():
    heads, n = 20000, 12
    slots = tokens(3, n, heads=1).map(lambda x: x.expand(1, heads, *x.shape[2:]).contiguous())
    query = torch.tensor([0.5, -0.2, 0.3])
    for sketch in (SubGen(1.0, s=2, t=1, seed=4), SubGenCoupled(1.0, t=1, seed=4)):
        held = feed(sketch, slots).slots
        weight = torch.exp(held.keys @ query).double()
        exact = torch.exp(slots.keys[0, 0] @ query).double()
        tau = (weight * held.mass).sum(-1)[0]
        z = (weight.unsqueeze(-1) * held.values).sum(2)[0]
        for estimates, truth in (
            (tau.unsqueeze(-1), exact.sum().unsqueeze(0)),
            (z, (exact.unsqueeze(-1) * slots.values[0, 0]).sum(0)),
        ):
            standard = estimates.std(0) / heads**0.5
            assert bool(((estimates.mean(0) - truth).abs() < 4 * standard + 1e-6).all())


def test_theorem_1_error_falls_like_one_over_sqrt_s():
    """Four times as many samples halve the mean error over 400 heads, within 15%."""
    heads, n = 400, 200
    slots = tokens(9, n, heads=1, dim=4).map(
        lambda x: x.expand(1, heads, *x.shape[2:]).contiguous()
    )
    queries = torch.full((1, heads, 1, 4), 0.2)
    exact = attend(queries, slots)
    errors = []
    for factor in (1, 4):
        sketch = feed(SubGen(0.5, s=40 * factor, t=8 * factor, seed=1), slots)
        errors.append(float((attend(queries, sketch.slots) - exact).norm(dim=-1).mean()))
    assert 1.7 < errors[0] / errors[1] < 2.3


def in_ball(seed, n, dim, heads):
    """n tokens, the same in every head, their keys uniform in the unit ball."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, dim, generator=g)
    keys = keys / keys.norm(dim=-1, keepdim=True) * torch.rand(n, 1, generator=g) ** (1 / dim)
    slots = Slots(keys[None, None], torch.randn(1, 1, n, dim, generator=g))
    return slots.map(lambda x: x.expand(1, heads, n, dim).contiguous())


def test_theorem_15_in_the_unit_ball():
    """At the calculated size the bound holds over 300 heads, for keys anywhere in the ball, and the
    number of slots does not grow with the stream."""
    heads, dim, eps, failure = 300, 2, 0.9, 0.2
    slots = in_ball(0, 800, dim, heads)
    query = torch.tensor([0.6, 0.8]).expand(1, heads, 1, dim)
    bound = error_bounds(query, slots.keys, slots.values, scaling=1.0).operator
    sketch = feed(SubGen.for_ball(dim, 1.0, eps, failure, seed=4), slots, (300,))
    error = measured_error(query, sketch.slots, slots.keys, slots.values, scaling=1.0)
    failures = int((error > eps * bound).sum())
    assert stats.binomtest(failures, heads, failure, "greater").pvalue > SIGNIFICANCE
    assert float((error / bound).max()) > 0.01
    assert int(sketch.clusters.max()) <= sketch.max_clusters == 8
    size = low_dimensional(eps, 1.0, dim, failure)
    assert (sketch.s, sketch.t) == (size.s, size.t)
    long = feed(SubGen.for_ball(dim, 1.0, eps, failure), in_ball(1, 20_000, dim, 1))
    most = long.s + long.t * long.max_clusters
    assert long.slots.count <= most == sketch.s + sketch.t * sketch.max_clusters


def test_theorem_15_refuses_what_no_ball_could_hold():
    slots = in_ball(2, 100, 2, 1)
    sketch = feed(SubGen.for_ball(2, 0.5, 0.9), slots)
    wide = Slots(20 * slots.keys, slots.values)
    with pytest.raises(InputError, match="max_clusters=8"):
        sketch.extend(wide)
    assert sketch.seen == 100
    feed(SubGen.for_ball(2, 0.025, 0.9, radius=20.0), wide)
    with pytest.raises(InputError, match="radius=0"):
        SubGen.for_ball(2, 0.5, 0.9, radius=0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(2, 50),
    cap=st.integers(1, 8),
    policy=st.sampled_from([("widen", None), ("widen", 0.3), ("nearest", 0.3)]),
)
def test_cap_policies_keep_the_cap_and_every_token(seed, n, cap, policy):
    overflow, delta = policy
    slots = tokens(seed, n)
    sketch = feed(SubGen(delta, s=2, t=2, max_clusters=cap, overflow=overflow), slots, (n // 2,))
    assert int(sketch.clusters.max()) <= cap
    torch.testing.assert_close(sketch.state["count"].sum(-1), torch.full((1, 2), n).double())
    needed = max(len(cluster_loop(slots.keys[0, h], float(sketch.radius.max()))[0]) for h in (0, 1))
    if overflow == "nearest":
        assert (int(sketch.overflowed.max()) > 0) == (needed > cap)
    if overflow == "widen":
        centers = sketch.state["center"] + sketch.state["origin"].unsqueeze(2)
        for head in range(2):
            m = int(sketch.clusters[0, head])
            distance = torch.cdist(slots.keys[0, head], centers[0, head, :m]).amin(1)
            assert float(distance.max()) <= 2 * float(sketch.radius[0, head]) + 1e-5


def test_overflow_error_leaves_the_sketch_as_it_was():
    slots = tokens(0, 700, spread=3.0)
    sketch = SubGen(0.5, s=4, t=2, max_clusters=40, overflow="error", seed=5)
    sketch.extend(slots.narrow(0, 20))
    before = copy.deepcopy(sketch)
    with pytest.raises(InputError, match="max_clusters=40"):
        sketch.extend(slots.narrow(20, 680))
    assert sketch.seen == 20
    for name, tensor in before.state.items():
        assert torch.equal(sketch.state[name], tensor), name
    for one in (sketch, before):
        one.extend(slots.narrow(20, 5))
    assert torch.equal(sketch.slots.keys, before.slots.keys)


@pytest.mark.parametrize("cls", [SubGen, SubGenCoupled])
def test_padding_does_not_exist(cls):
    slots = tokens(1, 30, batch=2)
    live = torch.ones(2, 2, 30, dtype=torch.bool)
    live[0, :, :12] = False
    wild = slots.keys.clone()
    wild[0, :, :12] = 1e3
    sketch = cls(0.7, t=2)
    feed(sketch, Slots(wild, slots.values).only(live), (5, 20))
    assert sketch.state["count"].sum(-1)[:, 0].tolist() == [18.0, 30.0]
    assert float(sketch.slots.keys.abs().max()) < 1e3
    only = cls(0.7, t=2)
    only.extend(slots.narrow(12, 18))
    assert torch.equal(sketch.clusters[0], only.clusters[0])


@pytest.mark.parametrize("cls", [SubGen, SubGenCoupled])
def test_ragged_heads_and_dead_slots(cls):
    """A head with a single cluster beside one with many has as many live slots as alone, with the
    same contents. The others are dead: whatever their keys, they do not change its attention."""
    slots = tokens(2, 40)
    slots.keys[:, 0] = 0.25
    sketch, alone = (feed(cls(0.3, t=2), part) for part in (slots, slots.map(lambda x: x[:, :1])))
    assert int(sketch.clusters[0, 0]) == 1 < int(sketch.clusters[0, 1])
    held, single = sketch.slots, alone.slots
    live = held.live()[0, 0]
    assert int((held.mass[0, 0] > 0).sum()) == 2
    assert int(live.sum()) == single.count < held.count
    for name, tensor in held.tensors().items():
        assert torch.equal(tensor[0, 0][live], single.tensors()[name][0, 0]), name
    queries = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    out = attend(queries, held)
    torch.testing.assert_close(out[:, :1], attend(queries[:, :1], single))
    wild = held.keys.masked_fill(~held.live().unsqueeze(-1), 50.0)
    assert torch.equal(attend(queries, Slots(wild, held.values, held.mass)), out)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": -1.0}, "delta=-1.0"),
        ({"delta": float("nan")}, "delta=nan"),
        ({"delta": 1.0, "s": 0}, "s=0"),
        ({"delta": 1.0, "t": 0}, "t=0"),
        ({"delta": 1.0, "max_clusters": 0}, "max_clusters=0"),
        ({"delta": 1.0, "overflow": "drop"}, "overflow='drop'"),
        ({"delta": None}, "max_clusters"),
        ({"delta": None, "max_clusters": 8, "overflow": "nearest"}, "overflow='widen'"),
        ({"delta": 1.0, "seed": 0.5}, "seed=0.5"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(InputError, match=named):
        SubGen(**arguments)


def test_zero_values_leave_the_numerator_empty():
    slots = tokens(0, 10)
    sketch = SubGen(1.0, s=4, t=1)
    sketch.extend(Slots(slots.keys, torch.zeros_like(slots.values)))
    queries = torch.randn(1, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    out = attend(queries, sketch.slots)
    assert torch.equal(out, torch.zeros_like(out))
    sketch.extend(tokens(1, 5))
    assert float(attend(queries, sketch.slots).abs().max()) > 0


def test_assign_prefers_the_nearest_and_numbers_on():
    points = torch.tensor([[[0.0], [5.0], [5.4], [0.3], [9.0]]])
    found = assign(
        points,
        torch.ones(1, 5, dtype=torch.bool),
        torch.tensor([[[0.2]]]),
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor([1]),
    )
    assert found.cluster.tolist() == [[0, 1, 1, 0, 1]]
    assert found.is_new.tolist() == [[False, True, False, False, False]]
    assert found.overflow.tolist() == [True]


def test_within_cluster_counts_in_order():
    weight = torch.tensor([[1.0, 2.0, 1.0, 4.0, 1.0]]).double()
    got = within_cluster(torch.tensor([[3, 0, 3, 0, 3]]), weight)
    assert got.tolist() == [[1.0, 2.0, 2.0, 6.0, 3.0]]
