"""Merging methods and measured allocation: what is preserved, what is never worse, odd input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import build
from kvsketch import InputError, Observed, SketchCache, Slots, attend
from kvsketch.compressors import ClusterMerge, HeavyMerge, Windowed, make
from kvsketch.compressors.clustering import Groups, group_keys
from kvsketch.evaluation.allocation import Curves, measure_curves, measure_schedule


def tokens(seed, n, heads=2, dim=4, batch=2):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, dim)
    return Slots(torch.randn(shape, generator=g), torch.randn(shape, generator=g))


def asked(seed, q, heads=4, dim=4, batch=2):
    g = torch.Generator().manual_seed(seed)
    return Observed(torch.randn(batch, heads, q, dim, generator=g), dim**-0.5)


def within(keys, groups):
    """The k-means objective per row."""
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
    """Sums of u and m are those of the tokens, also after merging twice."""
    live = torch.ones(2, 1, n, dtype=torch.bool)
    live[0, :, : min(padding, n - 1)] = False
    slots = tokens(seed, n).only(live)
    once = ClusterMerge()(slots, budget)
    twice = ClusterMerge()(once, max(1, budget // 2))
    for out in (once, twice):
        torch.testing.assert_close(out.values.sum(2), slots.values.sum(2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.masses().sum(2), slots.masses().sum(2))
    assert once.count == min(n, budget)


def test_equal_keys_merge_without_error():
    """Tokens in groups of equal keys: as many slots as groups answer exactly."""
    g = torch.Generator().manual_seed(1)
    centers = 5 * torch.randn(1, 2, 7, 4, generator=g)
    slots = Slots(centers[:, :, torch.arange(70) % 7], torch.randn(1, 2, 70, 4, generator=g))
    queries = torch.randn(1, 2, 9, 4, generator=g)
    for compressor in (ClusterMerge(), HeavyMerge(share=0.0, correct=False)):
        kept = Windowed(compressor, 0, 0)(slots, 12, Observed(queries, 0.5))
        answer = attend(queries, kept, scaling=0.5)
        if isinstance(compressor, ClusterMerge):
            exact = attend(queries, slots, scaling=0.5)
            torch.testing.assert_close(answer, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["cluster_merge", "heavy_merge"])
def test_odd_input_has_defined_results(name):
    """Identical tokens, one token, a budget above n, clusters nobody attends to."""
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


def test_a_singular_fit_changes_nothing_harmful():
    """The same query over and over: the Gram matrix has rank one, results stay finite and the
    answer to that query is right."""
    slots = tokens(3, 50, batch=1)
    queries = torch.randn(1, 2, 1, 4).expand(1, 2, 40, 4).contiguous()
    observed = Observed(queries, 0.5)
    kept = HeavyMerge(share=0.2)(slots, 10, observed)
    plain = HeavyMerge(share=0.2, correct=False)(slots, 10, observed)
    exact = attend(queries[:, :, :1], slots, scaling=0.5)
    errors = [
        float((attend(queries[:, :, :1], k, scaling=0.5) - exact).norm()) for k in (kept, plain)
    ]
    assert errors[0] <= errors[1] + 1e-6
    assert bool(torch.isfinite(kept.values).all())


def test_correction_helps_on_queries_it_was_fitted_to_and_on_held_out_ones():
    """Over 40 heads, on fresh queries of the same kind: the mean error falls, and it falls in at
    least nine heads of ten."""
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(40, 1, 200, 8, generator=g)
    slots = Slots(keys, torch.randn(40, 1, 200, 8, generator=g) + 0.5)
    base = torch.randn(40, 1, 1, 8, generator=g)
    fresh, queries = (1.5 * (base + 0.5 * torch.randn(40, 1, 64, 8, generator=g)) for _ in range(2))
    exact = attend(fresh, slots)
    errors = []
    for correct in (False, True):
        kept = HeavyMerge(correct=correct)(slots, 30, Observed(queries, 8**-0.5))
        errors.append((attend(fresh, kept) - exact).flatten(1).norm(dim=1))
    assert float(errors[1].mean()) < 0.95 * float(errors[0].mean())
    assert float((errors[1] / errors[0]).quantile(0.9)) < 1.0


def test_heavy_tokens_stay_exact():
    """Tokens that get most attention are there, untouched, with mass 1."""
    slots = tokens(5, 60, batch=1)
    keys = slots.keys.clone()
    queries = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    heavy = [7, 23, 41]
    keys[:, :, heavy] = 6 * torch.nn.functional.normalize(queries.mean(2, keepdim=True), dim=-1)
    slots = Slots(keys, slots.values)
    kept = HeavyMerge(share=0.5, correct=False)(slots, 12, Observed(queries, 1.0))
    for place in heavy:
        found = (kept.values == slots.values[:, :, place : place + 1]).all(-1)
        assert bool((found & (kept.masses() == 1)).any(-1).all())


def test_streaming_keeps_total_mass_through_many_compressions():
    model = build("llama")
    cache = SketchCache(model.config, "heavy_merge", budget=40, sink=2, recent=6)
    ids = torch.randint(3, 100, (2, 60), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=120, do_sample=False)
    assert out.shape == (2, 180)
    for layer in cache.layers:
        assert layer.sketch.held <= 41
        mass = layer.sketch.slots.masses().sum(-1)
        assert float((mass - 179).abs().max()) < 0.1 * 179  # a correction may move it a little


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"share": 1.0}, r"share=1\.0"),
        ({"share": -0.1}, r"share=-0\.1"),
        ({"ridge": 0.0}, r"ridge=0\.0"),
        ({"window": 0}, "window=0"),
        ({"steps": 0}, "steps=0"),
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
    """For convex falling curves the measured error of the allocation is at most that of uniform
    levels of the same total, and the mean share is 1."""
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
    curves = Curves(torch.rand(1, 2, 5).double().sort(-1, descending=True).values, KEPT)
    with pytest.raises(InputError, match=r"budget=0\.01"):
        curves.allocate(0.01)


def test_measured_schedule_goes_into_a_cache():
    """End to end on a real model: curves fall to 0, the schedule is accepted, memory is the same
    and heads differ."""
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
        cache = SketchCache(model.config, "heavy_merge", budget=0.4, schedule=chosen, **window)
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
