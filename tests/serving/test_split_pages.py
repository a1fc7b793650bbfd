"""Pages with a middle in few bits or with heads of different size, against one token at a time."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import KV, METHODS, SINKS, Served, alone, drawn, queries_of, run

from kvsketch.estimator import attend
from kvsketch.observed import causal
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm, Schedule
from kvsketch.slots import Slots
from kvsketch.vllm.pages import Due

WINDOW = 8  # sinks and recent tokens
BITS = [FULL, Bits(8, 8), Bits(8, 4), Bits(4, 4)]


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    heads=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    chunk=st.integers(1, 60),
    buffer=st.integers(1, 12),
    softcap=st.sampled_from([None, 4.0]),
    sinks=st.sampled_from(SINKS),
    data=st.data(),
)
def test_as_they_are(method, seed, sizes, heads, chunk, buffer, softcap, sinks, data):
    """With 16 bits and heads of any size every token's output is that of its request alone,
    computed in float64, token by token."""
    rhythm = Rhythm(WINDOW + buffer, buffer)
    kept = queries_of(method, rhythm)
    served = Served(method, rhythm, kept, softcap, middle=(heads, FULL), sinks=sinks)
    requests = [drawn(seed + number, size) for number, size in enumerate(sizes)]
    pages = data.draw(st.permutations(range(1, 9)))[: len(sizes)]
    budget = torch.tensor([heads]) + WINDOW
    for request, found in zip(requests, run(served, requests, pages, data, chunk), strict=True):
        expected = alone(method, rhythm, kept, request, softcap, budget, sinks)
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("bits", BITS, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    heads=st.sampled_from([(30, 30), (9, 30), (40, 1)]),
    chunk=st.integers(1, 60),
    data=st.data(),
)
def test_a_batch_is_its_requests_alone(bits, seed, sizes, heads, chunk, data):
    rhythm = Rhythm(WINDOW + 8, 8)
    served, own = (Served("heavy_merge", rhythm, 8, middle=(heads, bits)) for _ in range(2))
    requests = [drawn(seed + number, size) for number, size in enumerate(sizes)]
    pages = data.draw(st.permutations(range(1, 9)))[: len(sizes)]
    for request, found in zip(requests, run(served, requests, pages, data, chunk), strict=True):
        (expected,) = own.step([(3, 0, request)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1e-4, 0.01), (4, 0.01, 0.15)])
@pytest.mark.parametrize("heads", [(90, 90), (90, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_all_tokens_fit_only_bits_err(bits, least, most, heads, dtype):
    """Where all tokens fit, the only error is that of rounding, and the counted error is close to
    it."""
    request = [t.to(dtype) for t in drawn(7, 90)]
    found = {}
    for name in (Bits(bits, bits), FULL):
        served = Served("heavy_merge", Rhythm(24, 16), 16, None, dtype, middle=(heads, name))
        (out,) = served.step([(1, 0, request)])
        found[name] = out.double(), served.counts.errors / served.counts.compressions
    q, k, v = (t.double().transpose(0, 1)[None] for t in request)
    mask = causal(90, 90, torch.device("cpu"))
    exact = attend(q, Slots(k, v), scaling=0.5, mask=mask)[0].transpose(0, 1)
    (few, counted), (full, none) = found.values()
    assert none < (1e-5 if dtype == torch.float32 else 0.01)
    error = float((few - exact)[24:].norm() / exact[24:].norm())
    assert least < error < most
    assert least / 3 < counted < 3 * most
    torch.testing.assert_close(full, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_page_that_is_claimed_again_starts_anew(bits):
    served, fresh = (
        Served("heavy_merge", Rhythm(24, 16), 16, middle=((20, 33), bits)) for _ in range(2)
    )
    first, second = drawn(1, 70), drawn(2, 70)
    before = [t.clone() for t in served.parts()]
    served.step([(3, 0, first)])
    others = [page for page in range(9) if page != 3]
    for was, now in zip(before, served.parts(), strict=True):
        assert torch.equal(was[others].view(torch.uint8), now[others].view(torch.uint8))
    (found,) = served.step([(3, 0, second)])
    (expected,) = fresh.step([(5, 0, second)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_numbers_that_overflow_are_their_own_requests_loss(wrong):
    middle = (20, 33), Bits(4, 4)
    served, fresh = (Served("heavy_merge", Rhythm(24, 16), 16, middle=middle) for _ in range(2))
    broken, good = drawn(1, 70), drawn(2, 70)
    for tensor in broken:
        tensor[30] = wrong
    _, found = served.step([(3, 0, broken), (4, 0, good)])
    (expected,) = fresh.step([(4, 0, good)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_parts_of_a_page_do_not_overlap():
    served = Served("heavy_merge", Rhythm(24, 16), 16, middle=((20, 33), Bits(8, 4)))
    parts = list(served.parts())
    for number, part in enumerate(parts, start=1):
        part[1] = number
    assert all(bool((part[1] == number).all()) for number, part in enumerate(parts, start=1))
    assert sum(part[1].nbytes for part in parts) <= served.layout.bytes


@pytest.mark.parametrize("bits", [4, 8])
def test_large_pages_that_are_full_at_once(bits):
    """Requests whose pages are compressed together are answered as each by itself, also where a
    page has tokens so far from its others that all of it must be stored anew."""
    rhythm = Schedule(2, 6, 3, few_bits=True).rhythm(600)
    middle = ((rhythm.middle,) * KV, Bits(bits, bits))
    prompt, tokens = 640, 640 + 3 * rhythm.every
    requests = [[*drawn(seed, tokens)] for seed in range(3)]
    requests[1][1][prompt : prompt + 6] *= 300  # keys that are read after the prompt

    def answers(some):
        served = Served("heavy_merge", rhythm, queries_of("heavy_merge", rhythm), middle=middle)
        found = []
        for at, size in [(0, prompt), *((at, 1) for at in range(prompt, tokens))]:
            step = [(page, at, [t[at : at + size] for t in requests[page]]) for page in some]
            found.append(served.step(step, pieces=[256 if size > 1 else 0] * len(some)))
        return [torch.cat(outs) for outs in zip(*found, strict=True)]

    with mock.patch.object(Due, "_alone", autospec=True, side_effect=Due._alone) as alone:
        together = answers([0, 1, 2])
    assert alone.call_count == 3  # of the three requests, after the far keys
    for request, out in enumerate(together):
        torch.testing.assert_close(out, answers([request])[0])
