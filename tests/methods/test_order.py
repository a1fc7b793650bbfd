"""Sorting rows of numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsketch.methods.order import order

FEW = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 0.5, -2.5, float("inf"), -float("inf")]


@given(
    st.lists(st.sampled_from(FEW) | st.floats(allow_nan=False, width=32), min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_it_is_a_stable_argsort(numbers: list[float], descending: bool, dtype: torch.dtype) -> None:
    rows = torch.tensor([numbers, numbers[::-1]], dtype=dtype).unsqueeze(1)
    wanted = rows.argsort(dim=-1, descending=descending, stable=True)
    assert torch.equal(order(rows, descending), wanted)


@pytest.mark.parametrize("descending", [True, False])
def test_integers(descending: bool) -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randint(-(2**31), 2**31, (3, 50), generator=made)
    rows[:, 10:30] = rows[:, :1]
    wanted = rows.argsort(dim=-1, descending=descending, stable=True)
    assert torch.equal(order(rows, descending), wanted)


def test_rows_with_gradients() -> None:
    rows = torch.tensor([[2.0, 1.0]], requires_grad=True)
    assert order(rows).tolist() == [[1, 0]]
