"""Groups by the compiled kernel equal torch's, whose cheapest partners equal the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.kernels import native, pairs
from kvsketch.kernels.native import build
from kvsketch.methods import closest
from kvsketch.methods.closest import group_closest
from kvsketch.slots import Slots

#: of processors, from the least to what this one has
LEVELS = range(4)

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
    blocks=st.integers(1, 4),
    size=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 256, 264]),
    dim=st.sampled_from([1, 2, 5, 16, 64, 100, 512]),
    dead=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60)
def test_costs_and_partners_are_those_of_the_table(seed, blocks, size, dim, dead, dtype):
    given_ = [t.to(dtype) for t in made(seed, blocks, size, dim, dead)]
    cost, partner = pairs.cheapest(*given_)
    table = table_of(*given_)
    best = table.amin(2)
    torch.testing.assert_close(cost.double(), best, rtol=1e-4, atol=1e-4 * dim)
    assert partner.dtype == torch.int64
    assert bool(((partner >= 0) & (partner < size)).all())
    found = table.gather(2, partner.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-4 * dim)


def rows_of(seed, n, dim, dead, rows=6):
    """Slots of two batch rows with three heads, weights, numbers of columns and of groups."""
    g = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows // 3, 3, n, dim, generator=g)
    slots = Slots(keys, values, 0.5 + torch.rand(rows // 3, 3, n, generator=g))
    sizes = torch.randint(max(1, n // 2), n + 1, (rows,), generator=g)
    weight = torch.rand(rows, n, generator=g) + 0.05
    weight *= (torch.rand(rows, n, generator=g) >= dead) & (torch.arange(n) < sizes.unsqueeze(1))
    count = (sizes * torch.rand(rows, generator=g)).long().clamp(min=1)
    return slots, weight, count, sizes


@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    n=st.sampled_from([2, 3, 7, 8, 15, 17, 33, 64, 100, 257, 400, 700, 1000]),
    dim=st.sampled_from([2, 5, 16, 33]),
    dead=st.sampled_from([0.0, 0.3, 1.0]),
    share=st.sampled_from([0.1, 0.25, 0.5]),
)
@settings(max_examples=100)
def test_the_compiled_groups_are_torchs(seed, level, n, dim, dead, share):
    slots, weight, count, sizes = rows_of(seed, n, dim, dead)
    native.library().kvsketch_limit(level)
    groups, found = group_closest(slots, weight, count, share, None, sizes)
    with native.switched(False):
        wanted, enough = group_closest(slots, weight, count, share, None, sizes)
    assert torch.equal(found, enough)
    assert groups.count == wanted.count
    assert torch.equal(groups.index, wanted.index)


def test_rows_come_in_parts_and_chosen_slots_from_anywhere(monkeypatch):
    slots, weight, count, _ = rows_of(3, 90, 8, 0.1)
    chosen = torch.rand(6, 90, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :60]
    chosen = chosen.sort(1).values
    given_ = slots, weight[:, :60].contiguous(), count.clamp(max=40), 0.25, chosen
    wanted, _ = group_closest(*given_)
    monkeypatch.setattr(closest, "_POINTS", 1)
    assert torch.equal(group_closest(*given_)[0].index, wanted.index)
    with native.switched(False):
        assert torch.equal(group_closest(*given_)[0].index, wanted.index)


def test_a_row_without_enough_edges_has_no_groups_and_others_have_theirs():
    """Slots at no finite distance have no partners."""
    points = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    points[0, 10:] = torch.inf
    weight, sizes = torch.ones(2, 40), torch.tensor([40, 40])
    for count, enough in ((36, True), (20, False)):
        given_ = points.clone(), weight, sizes, torch.tensor([count, 20]), 0.5
        index, found = pairs.grouped(*given_)
        assert found.tolist() == [enough, True]
        assert index[1].unique().tolist() == list(range(20))


def test_slots_that_are_all_the_same_are_one_group():
    zeros = torch.zeros(1, 1, 40, 4)
    groups, found = group_closest(Slots(zeros, zeros, None), torch.ones(1, 40), 1, 0.5)
    assert bool(found)
    assert groups.index.tolist() == [[0] * 40]


def test_of_equal_slots_the_first_stay():
    """The cheapest edges of slots that are all the same lead to the first of each block."""
    zeros = torch.zeros(1, 1, 20, 3)
    groups, found = group_closest(Slots(zeros, zeros, None), torch.ones(1, 20), 17, 0.5)
    assert bool(found)
    assert groups.index.tolist() == [[0, 0, 0, 0, *range(1, 17)]]


def test_several_threads_say_what_one_says():
    given_ = rows_of(1, 300, 16, 0.1, rows=12)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(group_closest(*given_[:3], 0.25, None, given_[3]))
    finally:
        torch.set_num_threads(before)
    for groups, enough in found[1:]:
        assert torch.equal(groups.index, found[0][0].index)
        assert torch.equal(enough, found[0][1])


def test_views_are_taken():
    slots, weight, count, sizes = rows_of(2, 60, 6, 0.1)
    wanted, _ = group_closest(slots, weight, count, 0.25, None, sizes)
    beside = [torch.stack([t, t + 1], -1)[..., 0] for t in (weight, count, sizes)]
    found, _ = group_closest(slots, beside[0], beside[1], 0.25, None, beside[2])
    assert torch.equal(found.index, wanted.index)


def fuzz(count):
    """Shapes at random, for ``test_cpu.test_sanitizers_find_nothing``."""
    g = torch.Generator().manual_seed(0)
    for number in range(count):
        n, dim = (int(torch.randint(1, top, (), generator=g)) for top in (600, 40))
        native.library().kvsketch_limit(number % len(LEVELS))
        slots, weight, groups, sizes = rows_of(number, n, dim, 0.1)
        group_closest(slots, weight, groups, 0.25, None, sizes)
