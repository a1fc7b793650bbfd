"""BalanceKV's section 4.1 as printed, in the scripts that measure it."""

from __future__ import annotations

import inspect

import pytest
import torch

from benchmarks import attention_error, figure2
from kvsketch import Slots
from kvsketch.compressors import BalanceKV, Uniform
from kvsketch.evaluation.activations import Activations


def test_the_preset_of_figure_2():
    """The first 256 embeddings are kept, the last 256 queries ask, T = 1 .. 4; what is recent are
    the tokens from n - 256 to j, which are the held-back ones: no window before them."""
    sink, recent, queries, kept = attention_error.PRESETS["balancekv"]
    assert (sink, recent, queries) == (256, 0, 256)
    assert kept == [2.0**-t for t in (1, 2, 3, 4)]


def test_figure_2_is_as_printed():
    """256 tokens at either end, T = 1 .. 4, 10 seeds, c = 30 log(n/delta), blocks of 256, uniform
    beside it."""
    assert figure2.KEPT == 256
    assert figure2.RATES == (1, 2, 3, 4)
    assert inspect.signature(figure2.main).parameters["seeds"].default == 10
    assert figure2.CONSTANTS[0] == 30.0
    found = figure2.samplers(figure2.CONSTANTS)
    assert isinstance(found["balancekv c=30"](0), BalanceKV)
    assert found["uniform"] is Uniform
    for constant in figure2.CONSTANTS:
        method = found[f"balancekv c={constant:g}"](7)
        assert (method.constant, method.block, method.seed) == (constant, 256, 7)


def activations(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, 4, n, 3, generator=g)
    keys, values = (torch.randn(1, 2, n, 3, generator=g) for _ in range(2))
    return Activations(0, queries, keys, values, 3**-0.5)


def test_what_figure_2_keeps_and_asks():
    """[256] and S and {n - 256, .., j} against the exact attention of the query at j, one query at
    a time; S has exactly 2^-T of the tokens between, each counting 2^T times."""
    n, kept, caught = 120, 20, activations(120)
    seen = []

    class Every:
        """Every 2^T-th of the middle, with the weight of all."""

        def __init__(self, seed):
            self.seed = seed

        def __call__(self, middle, budget):
            seen.append((middle, budget))
            share = middle.count // budget
            part = middle.map(lambda t: t[:, :, ::share])
            return part.scaled(torch.full(part.keys.shape[:3], float(share)))

    found = figure2.layer_errors(caught, kept, (1, 3), {"every": Every}, range(2))
    assert [budget for _, budget in seen] == [40, 40, 10, 10]
    for middle, _ in seen:
        assert torch.equal(middle.keys, caught.keys[:, :, kept : n - kept])
    for rate in (1, 3):
        wrong, right = [], []
        for j in range(n - kept, n):
            query = caught.queries[0, :, j]
            places = [*range(kept), *range(kept, n - kept, 2**rate), *range(n - kept, j + 1)]
            weight = torch.ones(len(places))
            weight[kept : len(places) - (j + 1 - n + kept)] = 2.0**rate
            for head in range(4):
                keys, values = caught.keys[0, head // 2], caught.values[0, head // 2]
                score = torch.exp(keys @ query[head] * 3**-0.5)
                exact = score[: j + 1] @ values[: j + 1] / score[: j + 1].sum()
                mine = score[places] * weight
                wrong.append(mine @ values[places] / mine.sum() - exact)
                right.append(exact)
        expected = torch.stack(wrong).norm() / torch.stack(right).norm()
        assert found["every", rate] == pytest.approx([float(expected)] * 2, rel=1e-4)


def test_uniform_is_weighted_as_balancekv_is_unless_it_says_otherwise():
    g = torch.Generator().manual_seed(0)
    middle = Slots(*(torch.randn(1, 2, 64, 3, generator=g) for _ in range(2)))
    for name, weight in (("uniform", 4.0), ("uniform, unweighted", 1.0)):
        slots = figure2.compressed(middle, name, Uniform, 2, 0)
        assert slots.count == 16
        assert slots.masses().unique().tolist() == [weight]


def test_errors_are_means_over_prompts_by_seed():
    """The average and the standard deviation over seeds, not over prompts."""
    over = figure2.over_seeds([[1.0, 3.0], [2.0, 6.0]])
    assert over["error"] == pytest.approx(3.0)
    assert over["std"] == pytest.approx(((4.5 - 3) ** 2 * 2) ** 0.5)
