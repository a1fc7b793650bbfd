"""Pages of several requests at once, against each request alone, token by token, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import CPU, KV, METHODS, SINKS, Served, alone, drawn, queries_of, run

from kvsketch.errors import InputError
from kvsketch.estimator import attend
from kvsketch.page.layout import Layout
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.rounds import Copies, rounds
from kvsketch.vllm.states import States


@pytest.mark.parametrize("method", [None, *METHODS])
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    chunk=st.integers(1, 60),
    buffer=st.integers(1, 12),
    softcap=st.sampled_from([None, 4.0]),
    sinks=st.sampled_from(SINKS),
    data=st.data(),
)
def test_a_batch_is_its_requests_alone(method, seed, sizes, chunk, buffer, softcap, sinks, data):
    """Whatever the chunks, the other requests and the order, every token's output is that of its
    request alone, computed in float64, token by token."""
    rhythm = Rhythm(100 if method is None else 24, buffer)
    kept = queries_of(method, rhythm)
    served = Served(method, rhythm, kept, softcap, sinks=sinks)
    requests = [drawn(seed + number, size) for number, size in enumerate(sizes)]
    pages = data.draw(st.permutations(range(1, 9)))[: len(sizes)]
    answers = run(served, requests, pages, data, chunk)
    for request, found in zip(requests, answers, strict=True):
        expected = alone(method, rhythm, kept, request, softcap, sinks=sinks)
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-4)


@given(pages=st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_slices_are_the_pages(pages):
    """The slices cover exactly the pages, and are at most one more than the changes of step between
    pages."""
    todo = rounds(
        np.arange(len(pages) + 1),
        np.ones(len(pages), dtype=np.int64),
        np.array(pages),
        Rhythm(24, 4),
        1,
        CPU,
    )
    (one,) = todo
    assert one.rows.pages.tolist() == sorted(pages)
    numbers = [n for run in one.rows.runs for n in range(run.start, run.stop, run.step)]
    assert numbers == sorted(pages)
    steps = np.diff(sorted(pages))
    assert len(one.rows.runs) <= 1 + int((np.diff(steps) != 0).sum())


@given(pages=st.lists(st.integers(0, 4), min_size=2, max_size=8))
def test_made_up_requests_may_share_a_page(pages):
    """vLLM warms up with requests that all have the null block. Nobody reads their outputs."""
    starts, seen = np.arange(len(pages) + 1), np.full(len(pages), 30, dtype=np.int64)
    (one,) = rounds(starts, seen, np.array(pages), Rhythm(24, 4), 1, CPU)
    numbers = [n for run in one.rows.runs for n in range(run.start, run.stop, run.step)]
    assert numbers == sorted(pages)


def test_a_page_that_is_freed_and_claimed_again_starts_anew():
    """After a preemption a page serves another request from its first token; what the first request
    left in it has no effect."""
    rhythm = Rhythm(24, 4)
    served = Served("heavy_merge", rhythm, 4)
    first, second = drawn(1, 70), drawn(2, 70)
    served.step([(3, 0, first)])
    (found,) = served.step([(3, 0, second)])
    fresh = Served("heavy_merge", rhythm, 4)
    (expected,) = fresh.step([(5, 0, second)])
    assert torch.equal(found, expected)


def test_other_pages_are_not_touched():
    rhythm = Rhythm(24, 4)
    served = Served("heavy_merge", rhythm, 4)
    before = [t.clone() for t in served.parts()]
    served.step([(3, 0, drawn(1, 70))])
    for was, now in zip(before, served.parts(), strict=True):
        others = [page for page in range(9) if page != 3]
        assert torch.equal(was[others].view(torch.uint8), now[others].view(torch.uint8))


@pytest.mark.parametrize("method", ["heavy_merge", "cluster_merge", "snapkv", "keydiff"])
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_numbers_that_overflow_are_their_own_requests_loss(method, wrong):
    """After an overflow in one request the other requests of the batch answer as alone, and the
    page can be used again."""
    rhythm = Rhythm(24, 4)
    kept = queries_of(method, rhythm)
    served, fresh = Served(method, rhythm, kept), Served(method, rhythm, kept)
    broken, good = drawn(1, 70), drawn(2, 70)
    for tensor in broken:
        tensor[30] = wrong
    _, found = served.step([(3, 0, broken), (4, 0, good)])
    (expected,) = fresh.step([(4, 0, good)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (again,) = served.step([(3, 0, good)])
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_compressions_and_their_errors_are_counted():
    rhythm = Rhythm(24, 4)
    served = Served("streaming_llm", rhythm, 1)
    served.step([(3, 0, drawn(1, 24)), (4, 0, drawn(2, 23))])
    assert served.counts.compressions == 1
    q, k, v = (t.double() for t in drawn(1, 24))
    slots = Slots(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    one = q[-1:].transpose(0, 1)[None]
    was = attend(one, slots, scaling=0.5)
    some = torch.cat([torch.arange(2), torch.arange(6, 24)]).expand(1, KV, -1)
    now = attend(one, slots.take(some), scaling=0.5)
    error = ((now - was).norm(dim=-1) / was.norm(dim=-1)).mean()
    assert served.counts.errors == pytest.approx(float(error), rel=1e-3)


def test_errors_above_the_tolerance_are_counted():
    served = Served("streaming_llm", Rhythm(24, 4), 1)
    served.step([(3, 0, drawn(1, 60)), (4, 0, drawn(2, 60))])
    counts = served.counts
    mean = counts.errors / counts.compressions
    assert (counts.compressions, counts.above) == (20, 0)
    found = []
    for tolerance in (mean, 1e-9):
        again = Served("streaming_llm", Rhythm(24, 4), 1)
        again.counts.tolerance = tolerance
        again.step([(3, 0, drawn(1, 60)), (4, 0, drawn(2, 60))])
        found.append(again.counts.above)
    assert 0 < found[0] < 20 == found[1]


@pytest.mark.parametrize("middle", [None, ((20, 33), Bits(8, 8)), ((20, 20), FULL)])
@pytest.mark.parametrize("method", ["balancekv", "uniform"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), chunk=st.integers(1, 70), ahead=st.integers(0, 40))
def test_random_numbers_follow_from_the_tokens_seen(middle, method, seed, chunk, ahead):
    """Random numbers do not depend on the other requests of a batch, and are the same after a
    preemption."""
    rhythm = Rhythm(24, 8)
    served, own = (Served(method, rhythm, 1, middle=middle) for _ in range(2))
    request, other = drawn(seed, 70), drawn(seed + 1, 70 + ahead)
    if ahead:
        served.step([(2, 0, [t[:ahead] for t in other])])
    found = []
    for start in range(0, 70, chunk):
        new = [t[start : start + chunk] for t in request]
        later = [t[ahead + start : ahead + start + chunk] for t in other]
        found.append(served.step([(2, ahead + start, later), (3, start, new)])[1])
    (expected,) = own.step([(5, 0, request)])
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
    (again,) = served.step([(3, 0, request)])
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)
    assert served.counts.errors > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    rhythm = Rhythm(40, 8)
    served = Served("heavy_merge", rhythm, 8, dtype=dtype)
    request = [t.to(dtype) for t in drawn(3, 120)]
    (found,) = served.step([(2, 0, request)])
    expected = alone("heavy_merge", rhythm, 8, request, None)
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.02  # groups may differ where costs are nearly equal


@given(slots=st.integers(2, 50), buffer=st.integers(1, 50), seen=st.integers(0, 300))
def test_slots_follow_from_tokens(slots, buffer, seen):
    """The number of slots equals that of a count, one token at a time."""
    buffer = min(buffer, slots)
    rhythm, held = Rhythm(slots, buffer), 0
    for _ in range(seen):
        held += 1
        if held == slots:
            held -= buffer
    states = States.regular(rhythm, np.array([seen]))
    assert states.held(rhythm, np.array([seen])) == held


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[:, :-64], "at least"),
        (lambda raw: raw.view(torch.int16), "must be uint8"),
        (lambda raw: raw[0], "must be uint8"),
        (lambda raw: raw.flatten()[1:].as_strided((2, raw.shape[1]), (64, 1)), "multiples of 64"),
    ],
)
def test_memory_of_another_layout_is_refused(change, says):
    layout = Layout(3, 2, 10, 5, 5, 4, True, torch.bfloat16)
    raw = torch.zeros(3, layout.bytes, dtype=torch.uint8)
    with pytest.raises(InputError, match=says):
        layout.views(change(raw))


@pytest.mark.parametrize("middle", [(), (4, 4, 4), (5, 9, 200)])
def test_a_page_s_parts_do_not_overlap(middle):
    layout = Layout(3, 2, 10, 5, 5, 4, True, torch.bfloat16, middle, Bits(8, 4))
    raw = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    page, queries = layout.views(raw)
    tensors = [queries, *(t for part in page.open() for t in part.contents())]
    sizes = 0
    for number, part in enumerate(tensors, start=1):
        part[1] = number
        sizes += part[1].nbytes
    assert sizes <= layout.bytes < sizes + len(tensors) * 64
    for number, part in enumerate(tensors, start=1):
        assert bool((part[1] == number).all())
        assert bool((part[0] == 0).all())


@pytest.mark.parametrize("middle", [None, ((20, 33), Bits(4, 4))], ids=["one part", "two"])
@settings(max_examples=15, deadline=None)
@given(
    at=st.integers(1, 69),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 70),
    others=st.integers(0, 2),
)
def test_a_request_goes_on_from_the_copy_of_a_page(middle, at, seed, chunk, others):
    """A request can start from the copy of a page after any number of tokens, whatever the chunks,
    and answers as if it had read these tokens itself."""
    rhythm = Rhythm(24, 8)
    served, own = (Served("heavy_merge", rhythm, 8, middle=middle) for _ in range(2))
    request, end = drawn(seed, 70), drawn(seed + 1, 40)
    second = [torch.cat([a[:at], b]) for a, b in zip(request, end, strict=True)]
    rest = [drawn(seed + 5 + i, 3) for i in range(others)]
    for start in range(0, 70, chunk):
        part = [t[start : start + chunk] for t in request]
        to = Copies(*(np.array([n] + [m] * others) for n, m in ((-1, -1), (7, 0), (at, 0))))
        if not start <= at <= start + chunk:
            to = None
        served.step([(3, start, part), *((4 + i, 0, rest[i]) for i in range(others))], to)
    new = [t[at:] for t in second]
    start = Copies(*(np.array([n]) for n in (7, 0, 0)))
    (found,) = served.step([(5, at, new)], start)
    (expected,) = own.step([(5, 0, second)])
    torch.testing.assert_close(found, expected[at:], rtol=1e-4, atol=1e-5)
