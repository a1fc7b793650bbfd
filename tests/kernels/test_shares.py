"""The largest shares of attention: the compiled kernel and torch's way equal the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.kernels import cpu, native, shares
from kvsketch.kernels.native import build
from kvsketch.methods.scoring import recent_attention
from kvsketch.observed import Observed
from kvsketch.slots import Slots

#: of processors, from the least to what this one has
LEVELS = range(4)


@pytest.fixture(autouse=True)
def _whole():
    yield
    if native.library() is not None:
        native.library().kvsketch_limit(len(LEVELS))


@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 2),
    q=st.sampled_from([1, 7, 8, 9, 31, 32, 33, 65]),
    n=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 300, 513]),
    dim=st.sampled_from([1, 3, 16, 32, 100]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    compiled=st.booleans(),
    massive=st.booleans(),
)
@settings(max_examples=120)
def test_shares_are_those_of_all_scores(
    seed, level, batch, kv_heads, group, q, n, dim, scale, dtype, compiled, massive
):
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, kv_heads * group, q, dim, generator=made).to(dtype)
    keys = torch.randn(batch, kv_heads, n, dim, generator=made).to(dtype)
    if native.library() is not None:
        native.library().kvsketch_limit(level)
    with native.switched(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_SCORES", 1)
        patch.setattr(shares, "_QUERIES", 8)  # several blocks
        mass = None
        if massive:  # some slots are dead, and not all of a head
            mass = torch.rand(batch, kv_heads, n, generator=made) * 8 + 0.1
            mass *= torch.rand(mass.shape, generator=made) < 0.7
            mass[:, :, 0] = 1.0
        found = shares.largest_shares(Observed(queries, scale, after=True), keys, mass)
    grouped = queries.double().view(batch, kv_heads, group, q, dim)
    scores = scale * grouped @ keys.double().unsqueeze(2).mT
    if mass is not None:
        scores += mass.double().log()[:, :, None, None]
    exact = scores.softmax(-1).amax((2, 3))
    assert found.shape == (batch, kv_heads, n)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # a score of hundreds is a rounded number itself
    loose = 2e-5 * scale * dim + 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=loose, atol=loose)


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_numbers(threads):
    made = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(7, 90, 24, generator=made), torch.randn(7, 700, 24, generator=made)
    before = torch.get_num_threads()
    alone = [shares._compiled(queries[i : i + 1], keys[i : i + 1], None, 1.0) for i in range(7)]
    try:
        torch.set_num_threads(threads)
        assert torch.equal(shares._compiled(queries, keys, None, 1.0), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    group=st.integers(1, 3),
    q=st.sampled_from([1, 7, 16, 33, 70]),
    more=st.sampled_from([0, 1, 40, 300]),
    dim=st.sampled_from([1, 16, 33]),
    window=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, 20.0]),
    mass=st.booleans(),
    after=st.booleans(),
    sinks=st.booleans(),
    beside=st.booleans(),
)
@settings(max_examples=100)
def test_recent_attention_is_torchs(
    seed, level, group, q, more, dim, window, dtype, softcap, mass, after, sinks, beside
):
    native.library().kvsketch_limit(level)
    g = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, q + more, dim, generator=g).to(dtype)
    if beside:  # the heads of a token are side by side, as models return them
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    some = torch.rand(2, 3, q + more, generator=g) + 0.1
    some[..., 1::5] = 0.0  # dead
    observed = Observed(
        torch.randn(2, 3 * group, q, dim, generator=g).to(dtype),
        dim**-0.5,
        softcap,
        after=after,
        sinks=torch.randn(3 * group, generator=g) if sinks else None,
    )
    slots = Slots(keys, values, some if mass else None)
    assert cpu.received(slots, observed, torch.ones(q)) is not None
    found = recent_attention(slots, observed, window)
    with native.switched(False):
        wanted = recent_attention(slots, observed, window)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_recent_attention_of_padded_queries_and_with_slopes_is_left_to_torch():
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 9, 4, generator=g)
    slots, queries = Slots(keys, keys, None), torch.randn(1, 2, 3, 4, generator=g)
    live = Observed(queries, 1.0, live=torch.tensor([[False, True, True]]))
    assert cpu.received(slots, live, torch.ones(3)) is None
    assert cpu.received(slots, Observed(queries, 1.0, slopes=torch.ones(2)), torch.ones(3)) is None


def fuzz(count):
    """Shapes at random, for ``test_cpu.test_sanitizers_find_nothing``."""
    g = torch.Generator().manual_seed(0)
    for number in range(count):
        q, n, dim = (int(torch.randint(1, top, (), generator=g)) for top in (70, 300, 80))
        native.library().kvsketch_limit(number % len(LEVELS))
        queries, keys = (torch.randn(1, 2, x, dim, generator=g) for x in (q, n))
        shares.largest_shares(Observed(queries, 1.0, after=True), keys)
