"""Attention in pieces, with the logarithm of its denominator, equals the whole in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import partial as module
from kvsketch.partial import NOTHING, log_mass, partial


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    q=st.integers(1, 9),
    n=st.integers(1, 9),
    bias=st.sampled_from([None, "each", "all"]),
    causal=st.booleans(),
    scores=st.sampled_from([1, 20, 90, 1 << 26]),
)
def test_pieces_of_any_size_are_the_whole(seed, q, n, bias, causal, scores):
    g = torch.Generator().manual_seed(seed)
    n = q if causal else n
    queries, keys = torch.randn(2, 3, q, 8, generator=g), torch.randn(2, 3, n, 8, generator=g)
    values = torch.randn(2, 3, n, 5, generator=g)
    added = None
    if bias is not None and not causal:
        added = torch.randn(2, 3, q if bias == "each" else 1, n, generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", scores)
        out, total = partial(queries, keys, values, added, 0.3, 2.0, causal)
    wide = 2.0 * torch.tanh((queries.double() * 0.3) @ keys.double().mT / 2.0)
    if added is not None:
        wide = wide + added.double()
    if causal:
        wide = wide.masked_fill(torch.ones(q, n).triu(1).bool(), NOTHING)
    torch.testing.assert_close(out.double(), wide.softmax(-1) @ values.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(total.double(), wide.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masses_of_thousands_of_tokens_count_in_16_bits(dtype):
    """In half precision the log of a mass is not rounded: two slots of 1,000 and 1,113 tokens weigh
    what they should."""
    mass = torch.tensor([1000.0, 1113.0])
    keys = torch.zeros(1, 1, 2, 8, dtype=dtype)
    values = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 1, 2, 1).expand_as(keys).contiguous()
    bias = log_mass(mass).view(1, 1, 1, -1)
    out, total = partial(keys[:, :, :1], keys, values, bias, 1.0)
    share = float(mass[1] / mass.sum())
    torch.testing.assert_close(out.float(), torch.full(out.shape, share), rtol=5e-3, atol=0)
    assert float(total) == pytest.approx(math.log(float(mass.sum())), rel=1e-5)
