"""The order of the smallest coreset."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsketch import InputError, Slots, attend
from kvsketch.methods import METHODS
from kvsketch.theory import coreset_size


def test_it_is_the_formula() -> None:
    assert coreset_size(4, 0.5, 0) == 4
    assert coreset_size(64, 1.0, 2.0) == pytest.approx(8 * math.e**2)


@given(st.integers(1, 256), st.floats(0.01, 1.0), st.floats(0, 100))
def test_each_doubling_of_the_precision_doubles_it(d: int, eps: float, radius: float) -> None:
    size = coreset_size(d, eps, radius)
    assert coreset_size(d, eps / 2, radius) == pytest.approx(2 * size)
    assert coreset_size(4 * d, eps, radius) == pytest.approx(2 * size)
    assert coreset_size(d, eps, radius + 1) == pytest.approx(math.e * size)


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_as_many_tokens_do_for_keys_of_norm_one(radius: float) -> None:
    """With a constant of 1, kernel halving finds such a subset of random keys."""
    d, eps = 16, 0.25
    made = torch.Generator().manual_seed(0)

    def on_sphere(n: int) -> torch.Tensor:
        drawn = torch.randn(1, 1, n, d, generator=made, dtype=torch.float64)
        return torch.nn.functional.normalize(drawn, dim=-1)

    slots = Slots(on_sphere(1024), on_sphere(1024))
    kept = METHODS["kernel_halving"](scaling=1.0).compress(slots, int(coreset_size(d, eps, radius)))
    asked = radius * on_sphere(4096)
    error = attend(asked, kept, scaling=1.0) - attend(asked, slots, scaling=1.0)
    assert float(error.norm(dim=-1).max()) <= eps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.5, 1.0), "d=0"),
        ((4, 0.0, 1.0), "eps=0"),
        ((4, 1.5, 1.0), "eps=1.5"),
        ((4, 0.5, -1.0), "radius=-1"),
        ((4, 0.5, 601.0), "radius=601 must be at most 600"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[int, float, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        coreset_size(*arguments)
