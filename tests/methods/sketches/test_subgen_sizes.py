"""Radii and weights of SubGen's clusters when sketches are merged or widened."""

from __future__ import annotations

import math

import pytest
import torch

from kvsketch import Slots
from kvsketch.methods.sketches import SubGen, SubGenCoupled
from kvsketch.methods.sketches.online_clusters import assign


def tokens(seed, n, heads=2, dim=3):
    g = torch.Generator().manual_seed(seed)
    return Slots(*(torch.randn(1, heads, n, dim, generator=g) for _ in range(2)))


@pytest.mark.parametrize("cls", [SubGen, SubGenCoupled])
def test_t_samples_share_the_weight_of_their_cluster(cls):
    sketch = cls(0.8, t=3, seed=1)
    sketch.extend(tokens(0, 100))
    torch.testing.assert_close(sketch.slots.masses().sum(-1), torch.full((1, 2), 100.0))
    counts = sketch.state["count"][0, 0]
    m = int(sketch.clusters[0, 0])
    mass = sketch.slots.masses()[0, 0]
    mass = mass[mass > 0].view(m, 3)
    torch.testing.assert_close(mass, (counts[:m, None] / 3).expand(m, 3).to(mass.dtype))


@pytest.mark.parametrize("cls", [SubGen, SubGenCoupled])
@pytest.mark.parametrize("larger_first", [False, True])
def test_a_merged_sketch_has_the_larger_radius(cls, larger_first):
    """The radius is the larger one whichever sketch had it, and representatives are further apart
    than it."""
    narrow, wide = (cls(0.1, max_clusters=20, seed=seed) for seed in (1, 2))
    narrow.extend(tokens(1, 1))
    wide.extend(tokens(2, 200))
    assert float(narrow.radius.max()) == 0.1 < float(wide.radius.min())
    larger = wide.radius.clone()
    one, other = (wide, narrow) if larger_first else (narrow, wide)
    one.merge(other)
    assert bool((one.radius >= larger).all())
    for head in range(2):
        m = int(one.clusters[0, head])
        apart = torch.pdist(one.state["center"][0, head, :m].double())
        assert float(apart.min()) > float(larger[0, head]) * (1 - 1e-6)


def test_widening_doubles_the_radius():
    sketch = SubGen(0.05, max_clusters=6)
    sketch.extend(tokens(3, 300))
    doublings = (sketch.radius / 0.05).log2()
    assert torch.equal(doublings, doublings.round())
    assert float(doublings.min()) >= 1
    # no further than needed: with half the radius there would be too many clusters
    for head in range(2):
        half = SubGen(float(sketch.radius[0, head]) / 2)
        half.extend(tokens(3, 300).map(lambda t: t[:, head : head + 1]))  # noqa: B023
        assert int(half.clusters) > 6 / 2


def test_samples_that_are_added_are_copies_of_each_in_turn():
    """Every sample is copied in turn, so that the numbers of copies differ by at most one."""
    sketch = SubGen(delta=100.0, s=3, t=1, max_clusters=2, seed=5)
    sketch.extend(tokens(4, 50, heads=1))
    before = sketch.get("sample").keys[0, 0]
    sketch.widen(SubGen(delta=100.0, s=8, t=1, max_clusters=7))
    assert torch.equal(sketch.get("sample").keys[0, 0], before[[0, 1, 2, 0, 1, 2, 0, 1]])
    assert math.isfinite(float(sketch.slots.values.sum()))


def assigned(points, delta):
    """``assign`` without earlier clusters."""
    rows, count, dim = points.shape
    return assign(
        points,
        torch.ones(rows, count, dtype=torch.bool),
        points.new_zeros(rows, 0, dim),
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows,), delta, dtype=torch.float64),
        torch.full((rows,), 10**6),
    )


def test_a_representative_is_in_the_cluster_it_opened():
    """A key that opens a cluster is in it, also where keys differ by less than the rounding error
    of their distance."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(500, 1, 4, generator=g).double()
    points = points + 1e-9 * torch.randn(500, 6, 4, generator=g).double()
    found = assigned(points, 1e-12)
    for cluster, is_new in zip(found.cluster, found.is_new, strict=True):
        assert cluster[is_new].tolist() == list(range(int(is_new.sum())))


def test_float32_does_not_decide_between_near_representatives():
    """Keys of norm 3,000 get the clusters of a loop in float64, although the error of
    |x|^2 - 2 <x, k> + |k|^2 in float32 is larger than the differences between distances."""
    g = torch.Generator().manual_seed(1)
    points = 1500 + torch.randn(1, 300, 4, generator=g)
    found = assigned(points, 1.5)
    centers, expected = [], []
    for point in points[0].double():
        distance = [float((point - c).norm()) for c in centers]
        if not distance or min(distance) > 1.5:
            centers.append(point)
            distance.append(0.0)
        expected.append(distance.index(min(distance)))
    assert 10 < len(centers) < 100
    assert found.cluster[0].tolist() == expected
