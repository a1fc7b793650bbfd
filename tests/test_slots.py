"""Laws of the estimator ``attend`` in float64 and, within stated tolerances, in lower precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import InputError, Observed, Slots, attend
from kvsketch.estimator import attention_received
from kvsketch.observed import causal

KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 8, 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 20)
groups = st.sampled_from([1, 2, 3])


def tensors(seed, n, group=2, q=3, batch=2, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, KV_HEADS * group, q, HEAD_DIM, generator=g, dtype=torch.float64)
    keys = scale * torch.randn(batch, KV_HEADS, n, HEAD_DIM, generator=g, dtype=torch.float64)
    values = torch.randn(batch, KV_HEADS, n, VALUE_DIM, generator=g, dtype=torch.float64)
    mass = torch.rand(batch, KV_HEADS, n, generator=g, dtype=torch.float64) + 0.1
    return queries.to(dtype), keys.to(dtype), values.to(dtype), mass


def softmax_attention(queries, keys, values, scaling=None, mask=None):
    group = queries.shape[1] // keys.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(group, dim=1),
        values.repeat_interleave(group, dim=1),
        attn_mask=mask,
        scale=scaling,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, group=groups)
def test_exact_tokens_are_softmax_attention(dtype, seed, n, group):
    queries, keys, values, _ = tensors(seed, n, group, dtype=dtype)
    expected = softmax_attention(queries.double(), keys.double(), values.double(), 0.3)
    ones = torch.ones(keys.shape[:3])
    for mass in (None, ones):
        out = attend(queries, Slots(keys, values, mass), scaling=0.3)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes)
def test_default_scaling_is_head_dim_to_the_minus_half(seed, n):
    queries, keys, values, _ = tensors(seed, n)
    expected = softmax_attention(queries, keys, values)
    torch.testing.assert_close(attend(queries, Slots(keys, values)), expected)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes)
def test_mask_is_honoured(seed, n):
    queries, keys, values, _ = tensors(seed, n, q=min(n, 3))
    mask = causal(queries.shape[2], n, queries.device)
    expected = softmax_attention(queries, keys, values, mask=mask)
    torch.testing.assert_close(attend(queries, Slots(keys, values), mask=mask), expected)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes)
def test_permutation_changes_nothing(seed, n):
    queries, keys, values, mass = tensors(seed, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    slots = Slots(keys, values, mass)
    shuffled = slots.take(order.expand(*keys.shape[:2], n))
    torch.testing.assert_close(attend(queries, slots), attend(queries, shuffled))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, share=st.floats(0.01, 0.99))
def test_splitting_a_slot_changes_nothing(seed, n, share):
    queries, keys, values, mass = tensors(seed, n)
    slots = Slots(keys, values, mass)
    last = slots.narrow(n - 1, 1)
    part = torch.full_like(last.masses(), share)
    halves = [slots.narrow(0, n - 1), last.scaled(part), last.scaled(1 - part)]
    torch.testing.assert_close(attend(queries, Slots.cat(halves)), attend(queries, slots))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, constant=st.floats(-1e4, 1e4))
def test_adding_a_constant_to_all_scores_changes_nothing(seed, n, constant):
    """The constant is added as one more dimension of the keys, in which the queries are 1."""
    queries, keys, values, mass = tensors(seed, n)
    slots = Slots(keys, values, mass)
    shifted = torch.cat([keys, torch.full_like(keys[..., :1], constant)], dim=-1)
    ones = torch.cat([queries, torch.ones_like(queries[..., :1])], dim=-1)
    expected = attend(queries, slots, scaling=1.0)
    actual = attend(ones, Slots(shifted, values, mass), scaling=1.0)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_finite_and_right_at_huge_scores(dtype, size):
    """At scores of +-1e4 the result is right, and a dead slot of score 0 does not count."""
    queries = torch.ones(1, 2, 1, 4, dtype=dtype)
    keys = torch.full((1, 1, 3, 4), size / 4, dtype=dtype)
    keys[:, :, 2] = 0
    values = torch.tensor([[1.0], [3.0], [0.0]], dtype=dtype)[None, None]
    mass = torch.tensor([[[1.0, 1.0, 0.0]]])
    out = attend(queries, Slots(keys, values, mass), scaling=1.0)
    torch.testing.assert_close(out.double(), torch.full((1, 2, 1, 1), 2.0, dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes)
def test_slots_without_mass_or_value_count_on_their_own_side_only(seed, n):
    """A slot with m = 0 adds to the numerator only, one with u = 0 to the denominator only, as in
    plain sums in float64."""
    queries, keys, values, mass = tensors(seed, n + 2, group=1, scale=0.5)
    mass[:, :, 0] = 0
    values[:, :, 1] = 0
    weights = torch.exp(queries @ keys.transpose(-1, -2) * 0.7)
    expected = (weights @ values) / (weights @ mass.unsqueeze(-1))
    actual = attend(queries, Slots(keys, values, mass), scaling=0.7)
    torch.testing.assert_close(actual, expected)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, extra=st.integers(1, 5))
def test_dead_slots_change_nothing(seed, n, extra):
    queries, keys, values, mass = tensors(seed, n)
    slots = Slots(keys, values, mass)
    _, other_keys, other_values, _ = tensors(seed + 1, extra, scale=50.0)
    dead = Slots(other_keys, 0 * other_values, torch.zeros(other_keys.shape[:3]).double())
    torch.testing.assert_close(attend(queries, Slots.cat([slots, dead])), attend(queries, slots))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, m=sizes)
def test_concatenation_is_attention_over_both(seed, n, m):
    queries, keys, values, _ = tensors(seed, n + m)
    whole = Slots(keys, values)
    parts = Slots.cat([whole.narrow(0, n), whole.narrow(n, m)])
    expected = softmax_attention(queries, keys, values)
    torch.testing.assert_close(attend(queries, parts), expected)
    weighted = Slots.cat([whole.narrow(0, n), whole.narrow(n, m).scaled(torch.ones(2, 2, m))])
    torch.testing.assert_close(attend(queries, weighted), expected)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, softcap=st.floats(1.0, 50.0))
def test_softcap(seed, n, softcap):
    queries, keys, values, _ = tensors(seed, n, group=1)
    scores = queries @ keys.transpose(-1, -2) * 2.0
    expected = torch.softmax(softcap * torch.tanh(scores / softcap), -1) @ values
    actual = attend(queries, Slots(keys, values), scaling=2.0, softcap=softcap)
    torch.testing.assert_close(actual, expected)


def test_alibi_slopes_follow_positions():
    queries, keys, values, _ = tensors(0, 9, group=2)
    positions = torch.arange(9.0).expand(2, KV_HEADS, 9)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).double()
    scores = torch.einsum("bhqd,bhsd->bhqs", queries, keys.repeat_interleave(2, 1))
    scores = scores + slopes[None, :, None, None] * torch.arange(9.0)
    expected = torch.softmax(scores, -1) @ values.repeat_interleave(2, 1)
    slots = Slots(keys, values, positions=positions)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = slots.take(order.expand(2, KV_HEADS, 9))
    actual = attend(queries, shuffled, scaling=1.0, slopes=slopes)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros():
    queries, keys, values, _ = tensors(0, 4)
    out = attend(queries, Slots(keys, values), mask=torch.zeros(1, 1, 3, 4, dtype=torch.bool))
    assert bool((out == 0).all())


def test_long_inputs_go_in_blocks(monkeypatch):
    queries, keys, values, _ = tensors(3, 40, q=17)
    whole = attend(queries, Slots(keys, values))
    received = attention_received(Slots(keys, values), Observed(queries, 0.3))
    monkeypatch.setattr("kvsketch.estimator._BLOCK_SCORES", 400)
    torch.testing.assert_close(attend(queries, Slots(keys, values)), whole)
    again = attention_received(Slots(keys, values), Observed(queries, 0.3))
    torch.testing.assert_close(again, received)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=st.integers(1, 12))
def test_attention_received_sums_the_causal_attention_matrix(seed, n):
    queries, keys, values, _ = tensors(seed, n, group=2, q=n)
    scores = torch.einsum("bhqd,bhsd->bhqs", queries, keys.repeat_interleave(2, 1)) * 0.4
    hidden = torch.ones(n, n).triu(1).bool()
    matrix = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    expected = matrix.sum(2).unflatten(1, (KV_HEADS, 2)).sum(2)
    actual = attention_received(Slots(keys, values), Observed(queries, 0.4))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"values": torch.zeros(1, 2, 4, 8)}, "differ"),
        ({"keys": torch.zeros(2, 4, 8)}, "num_key_value_heads"),
        ({"mass": torch.zeros(1, 2, 4)}, "mass"),
        ({"score": torch.zeros(1, 3)}, "score"),
    ],
)
def test_bad_slots_are_named(change, word):
    good = {"keys": torch.zeros(1, 2, 3, 8), "values": torch.zeros(1, 2, 3, 8)}
    with pytest.raises(InputError, match=word):
        Slots(**{**good, **change})


@pytest.mark.parametrize(
    ("shape", "word"),
    [((1, 3, 1, 8), "multiple"), ((1, 4, 1, 7), "head_dim"), ((4, 1, 8), "num_attention_heads")],
)
def test_bad_queries_are_named(shape, word):
    slots = Slots(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(InputError, match=word):
        attend(torch.zeros(shape), slots)


def test_slopes_need_positions():
    slots = Slots(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(InputError, match="positions"):
        attend(torch.zeros(1, 2, 1, 8), slots, slopes=torch.ones(2))


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    group=groups,
    block=st.sampled_from([1, 40, 300, 2000]),
    few=st.sampled_from([1, 4, 16]),
    weighted=st.booleans(),
    alibi=st.booleans(),
    sunk=st.booleans(),
    padded=st.booleans(),
)
def test_attention_received_is_the_same_in_blocks_of_any_size(
    seed, group, block, few, weighted, alibi, sunk, padded
):
    """The result is the same in blocks of heads, of queries or of both, with the sinks and slopes
    of each head."""
    queries, keys, values, mass = tensors(seed, 20, group, 9)
    g = torch.Generator().manual_seed(seed)
    heads = KV_HEADS * group
    position = torch.arange(20).double().expand(2, KV_HEADS, 20) if alibi else None
    slots = Slots(keys, values, mass if weighted else None, position)
    live = torch.rand(2, 9, generator=g) < 0.7 if padded else None
    slopes = torch.rand(heads, generator=g).double() if alibi else None
    # Scores with ALiBi are known up to a constant only, which a sink would not ignore.
    sinks = torch.randn(heads, generator=g).double() if sunk and not alibi else None
    observed = Observed(queries, 0.4, 5.0, slopes, live, sinks)
    weights = torch.rand(2, 9, generator=g)
    expected = [attention_received(slots, observed, w) for w in (None, weights)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsketch.estimator._BLOCK_SCORES", block)
        patch.setattr("kvsketch.estimator._FEW_QUERIES", few)
        found = [attention_received(slots, observed, w) for w in (None, weights)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
