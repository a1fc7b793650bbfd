"""A sink in the softmax is a slot with key 0, value 0 and mass exp(sink): attention, scores, fits
and errors with sinks equal those without sinks over the slots and that slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsketch import InputError, Observed, Slots, attend
from kvsketch.attention import attend_to
from kvsketch.cache import windowed
from kvsketch.cache.error import Probe, WindowError
from kvsketch.estimator import attention_received
from kvsketch.page.part import Part

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def case(seed: int, weighted: bool, n: int = 24, q: int = 6, group: int = 1) -> Any:
    """Slots, observed queries with sinks, and the slots with the slot of a sink before them
    (without it for grouped queries, whose sinks differ within a KV head)."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, n, 4, generator=generator, **DOUBLE)
    queries = torch.randn(2, 3 * group, q, 4, generator=generator, **DOUBLE)
    sinks = torch.randn(3 * group, generator=generator, **DOUBLE) * 2
    mass = torch.rand(2, 3, n, generator=generator, **DOUBLE) + 0.5 if weighted else None
    slots = Slots(keys, values, mass)
    if group > 1:
        return slots, Observed(queries, 0.5, sinks=sinks), slots
    zero = torch.zeros(2, 3, 1, 4, **DOUBLE)
    taken = Slots(zero, zero, sinks.exp().view(1, 3, 1).expand(2, 3, 1))
    return slots, Observed(queries, 0.5, sinks=sinks), Slots.cat([taken, slots])


@settings(max_examples=20)
@given(seed=st.integers(0, 999), weighted=st.booleans())
def test_attention(seed: int, weighted: bool) -> None:
    slots, observed, reference = case(seed, weighted)
    sinks, queries = observed.sinks, observed.queries
    expected = attend(queries, reference, scaling=0.5)
    torch.testing.assert_close(attend(queries, slots, scaling=0.5, sinks=sinks), expected)
    one = replace(observed, queries=queries[:, :, :1])
    found = attend_to(one, [Part(slots)])
    torch.testing.assert_close(found, expected[:, :, :1])
    received = attention_received(slots, observed)
    plain = replace(observed, sinks=None)
    torch.testing.assert_close(received, attention_received(reference, plain)[..., 1:])


@settings(max_examples=10)
@given(seed=st.integers(0, 999), weighted=st.booleans())
def test_every_query_head_has_its_own(seed: int, weighted: bool) -> None:
    """Attention of grouped queries uses the sink of each query head, as a loop over heads shows."""
    slots, observed, _ = case(seed, weighted, group=2)
    assert observed.sinks is not None
    found = attend(observed.queries, slots, scaling=0.5, sinks=observed.sinks)
    masses = slots.masses()
    for head in range(6):
        weights = (0.5 * observed.queries[:, head] @ slots.keys[:, head // 2].mT).exp()
        total = (weights * masses[:, head // 2, None]).sum(-1) + observed.sinks[head].exp()
        expected = weights @ slots.values[:, head // 2] / total.unsqueeze(-1)
        torch.testing.assert_close(found[:, head], expected)


def test_a_large_sink_takes_everything_and_overflows_nothing() -> None:
    slots, observed, _ = case(0, True)
    huge = torch.full((3,), 1e4, **DOUBLE)
    for sinks in (huge, -huge):
        out = attend(observed.queries, slots, scaling=0.5, sinks=sinks)
        assert bool(torch.isfinite(out).all())
    assert float(attend(observed.queries, slots, scaling=0.5, sinks=huge).abs().max()) == 0
    torch.testing.assert_close(
        attend(observed.queries, slots, scaling=0.5, sinks=-huge),
        attend(observed.queries, slots, scaling=0.5),
    )


@pytest.mark.parametrize(
    "method", ["h2o", "snapkv", "tova", "observed_attention", "expected_attention", "heavy_merge"]
)
@pytest.mark.parametrize("q", [6, 20])
def test_scores_are_what_is_left_by_the_sink(method: str, q: int) -> None:
    """With sinks, a method gives every slot the score that it has beside the slot of the sink."""
    slots, observed, reference = case(1, False, n=40, q=q)
    mine = windowed(method, 1, 2).observe(slots, observed).score
    plain = replace(observed, sinks=None)
    theirs = windowed(method, 1, 2).observe(reference, plain).score
    without = windowed(method, 1, 2).observe(slots, plain).score
    assert mine is not None
    assert theirs is not None
    assert without is not None
    if method != "snapkv":  # it pools scores, and would pool that of the sink's slot
        torch.testing.assert_close(mine, theirs[..., 1:].to(mine.dtype), rtol=1e-5, atol=1e-7)
    assert float((mine - without).abs().max()) > 1e-4


@settings(max_examples=10)
@given(seed=st.integers(0, 999))
def test_measured_errors(seed: int) -> None:
    slots, observed, reference = case(seed, False, n=40, q=8)
    kept = windowed("streaming_llm", 2, 8)(slots, 20)

    def attended(s: Slots, sinks: Tensor | None) -> Tensor:
        from kvsketch.observed import causal

        mask = causal(8, s.count, s.keys.device)
        return attend(observed.queries, s, scaling=0.5, mask=mask, sinks=sinks)

    exact, answer = attended(reference, None), attended(kept, observed.sinks)
    wrong = (answer - exact).square().sum((2, 3)) / exact.square().sum((2, 3))
    torch.testing.assert_close(WindowError(slots, observed, 8).error(kept), wrong.sqrt())


def test_the_running_error_knows_sinks() -> None:
    """The error of a probe that received its tokens in parts includes the sinks: it equals the
    error against attention over all tokens at once."""
    slots, observed, _ = case(3, False, n=40, q=8)
    probe = Probe(slots.narrow(0, 20), observed)
    probe.extend(slots.narrow(20, 13))
    probe.extend(slots.narrow(33, 7))
    kept = windowed("uniform", 2, 4)(slots, 16)
    exact, answer = (
        attend(observed.queries, s, scaling=0.5, sinks=observed.sinks) for s in (slots, kept)
    )
    wrong = (answer - exact).square().sum((2, 3)) / exact.square().sum((2, 3))
    torch.testing.assert_close(probe.error(kept), wrong.sqrt())
    assert float(probe.error(slots).max()) < 1e-12


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_sinks_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    slots, observed, _ = case(0, False)
    with pytest.raises(InputError, match=r"sinks must have shape \(3,\)"):
        attend(observed.queries, slots, sinks=torch.zeros(shape, **DOUBLE))
