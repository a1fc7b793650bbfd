"""The cheapest partners of slots: the compiled kernel and torch's way equal the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.kernels import native, pairs
from kvsketch.kernels.native import build

#: of processors, from the least to what this one has
LEVELS = range(3)

if build.compiler() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _whole():
    assert native.library() is not None, native.kernel()
    yield
    native.library().kvsketch_limit(len(LEVELS))


def made(seed, blocks, size, dim, dead):
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(blocks, size, dim, generator=g)
    weight = torch.rand(blocks, size, generator=g) + 0.05
    absent = torch.where(torch.rand(blocks, size, generator=g) < dead, torch.inf, 0.0)
    return points, weight.reciprocal(), absent


def table_of(points, per_weight, absent):
    """The costs of all pairs in float64."""
    x, per = points.double(), per_weight.double()
    far = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    cost = far / (per.unsqueeze(2) + per.unsqueeze(1))
    cost = cost + absent.double().unsqueeze(2) + absent.double().unsqueeze(1)
    return cost.diagonal_scatter(torch.full(absent.shape, torch.inf).double(), 0, 1, 2)


@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    blocks=st.integers(1, 4),
    size=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 256, 264]),
    dim=st.sampled_from([1, 2, 5, 16, 64, 100, 512]),
    dead=st.sampled_from([0.0, 0.3, 1.0]),
    compiled=st.booleans(),
)
@settings(max_examples=150)
def test_costs_and_partners_are_those_of_the_table(seed, level, blocks, size, dim, dead, compiled):
    given_ = made(seed, blocks, size, dim, dead)
    native.library().kvsketch_limit(level)
    with native.switched(compiled):
        cost, partner = pairs.cheapest(*given_)
    table = table_of(*given_)
    best = table.amin(2)
    torch.testing.assert_close(cost.double(), best, rtol=1e-4, atol=1e-4 * dim)
    assert partner.dtype == torch.int64
    assert bool(((partner >= 0) & (partner < size)).all())
    found = table.gather(2, partner.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-4 * dim)


def test_both_of_a_pair_have_the_same_cost_to_the_bit():
    """``closest`` compares them: of two slots that are each other's partners one must stay."""
    cost, partner = pairs.cheapest(*made(0, 3, 256, 64, 0.1))
    mutual = partner.gather(1, partner) == torch.arange(256)
    assert bool(mutual.any())
    assert torch.equal(cost[mutual], cost.gather(1, partner)[mutual])


def test_of_equal_partners_the_first_is_taken():
    points = torch.zeros(1, 40, 3)
    cost, partner = pairs.cheapest(points, torch.ones(1, 40), torch.zeros(1, 40))
    assert bool((cost == 0).all())
    assert partner.tolist() == [[1, *[0] * 39]]


def test_several_threads_say_what_one_says():
    given_ = made(1, 37, 64, 16, 0.1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(pairs.cheapest(*given_))
    finally:
        torch.set_num_threads(before)
    for cost, partner in found[1:]:
        assert torch.equal(cost, found[0][0])
        assert torch.equal(partner, found[0][1])


def test_views_and_wider_numbers_are_taken():
    points, per_weight, absent = made(2, 3, 20, 6, 0.1)
    wanted = pairs.cheapest(points, per_weight, absent)
    beside = [torch.stack([t, t + 1], -1)[..., 0] for t in (points, per_weight, absent)]
    for given_ in (beside, [t.double() for t in (points, per_weight, absent)]):
        cost, partner = pairs.cheapest(*given_)
        torch.testing.assert_close(cost.float(), wanted[0], rtol=1e-4, atol=1e-4)
        fits = torch.isfinite(wanted[0])
        assert torch.equal(partner[fits], wanted[1][fits])


def fuzz(count):
    """Shapes at random, for ``test_cpu.test_sanitizers_find_nothing``."""
    g = torch.Generator().manual_seed(0)
    for number in range(count):
        blocks, size, dim = (int(torch.randint(1, top, (), generator=g)) for top in (4, 70, 40))
        native.library().kvsketch_limit(number % len(LEVELS))
        pairs.cheapest(*made(number, blocks, size, dim, 0.1))
