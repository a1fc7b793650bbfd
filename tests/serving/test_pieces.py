"""Prompts in pieces that are compressed at once, against one token at a time, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import CPU, KV, METHODS, Served, drawn, queries_of, run

from kvsketch.cache.window import windowed
from kvsketch.estimator import attend
from kvsketch.observed import Observed
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.pages import compress_all
from kvsketch.vllm.rounds import Copies, rounds
from kvsketch.vllm.states import KnownPages, States


def alone(method, rhythm, kept, request, prompt, piece, budget):
    """Outputs of a request read token by token, ``[tokens, heads, dim]`` in float64. ``prompt``:
    number of tokens in pieces of ``piece`` tokens; the other arguments as in ``served.alone``."""
    q, k, v = (t.double() for t in request)
    made = windowed(method, 2, 6)
    first, held, start, slots = rhythm.slots - rhythm.every, 0, 0, None
    found, waiting = [], []
    for at in range(len(q)):
        new = Slots(k[at : at + 1].transpose(0, 1)[None], v[at : at + 1].transpose(0, 1)[None])
        ones = torch.ones(1, KV, 1, dtype=torch.float64)
        score = 0 * ones if made.requires.queries else None
        new = Slots(new.keys, new.values, ones, score=score)
        slots = new if slots is None else Slots.cat([slots, new])
        one = q[at : at + 1].transpose(0, 1)[None]
        found.append(attend(one, slots, scaling=0.5)[0, :, 0])
        waiting.append(one)
        held, seen = held + 1, at + 1
        ends = seen <= prompt and (seen % piece == 0 or seen == prompt)
        whole = ends and seen - start > 1
        if (seen <= prompt and not ends) or (not whole and held < rhythm.slots):
            start = seen if ends else start
            continue
        last = seen - start if whole else kept
        asked = Observed(torch.cat(waiting[-last:], dim=2), 0.5)
        given = asked
        if made.requires.queries:
            before = slots.score
            if whole and made.requires.echo:
                own = torch.cat(waiting[start - seen :], dim=2)
                given = Observed(own, 0.5, after=True)
                slots = made.observe(replace(slots, score=None), asked)
                slots = made.echo(slots, given, None, alone=False)
                slots = replace(slots, score=torch.maximum(slots.score, before))
            else:
                slots = made.observe(slots, asked)
        start = seen
        if held > first:
            slots = made(slots, budget, given, scored=True, decoding=True)
            slots = slots.take((slots.masses() != 0).long().argsort(dim=-1, stable=True))
            held = first
    return torch.stack(found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("middle", [None, (30, 30), (13, 40)], ids=["one part", "two", "uneven"])
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 40)), min_size=1, max_size=4),
    piece=st.integers(2, 50),
    chunk=st.integers(1, 40),
    buffer=st.integers(1, 12),
    data=st.data(),
)
def test_a_batch_is_its_requests_alone(method, middle, seed, sizes, piece, chunk, buffer, data):
    """Whatever the other requests and however the scheduler puts pieces together, every token's
    output is that of its request alone."""
    rhythm = Rhythm(24 if middle is None else 8 + buffer, buffer)
    kept = queries_of(method, rhythm)
    given = None if middle is None else (middle, FULL)
    served = Served(method, rhythm, kept, middle=given)
    requests = [drawn(seed + n, prompt + more) for n, (prompt, more) in enumerate(sizes)]
    prompts = [prompt for prompt, _ in sizes]
    pages = data.draw(st.permutations(range(1, 9)))[: len(sizes)]
    answers = run(served, requests, pages, data, chunk, prompts, piece)
    budget = torch.tensor([middle]) + 8 if middle else rhythm.slots - buffer
    for request, prompt, found in zip(requests, prompts, answers, strict=True):
        expected = alone(method, rhythm, kept, request, prompt, piece, budget)
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("bits", [Bits(8, 8), Bits(4, 4)], ids=str)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    prompt=st.integers(1, 90),
    more=st.integers(0, 40),
    piece=st.integers(2, 50),
    chunk=st.integers(1, 40),
    data=st.data(),
)
def test_in_few_bits_too(bits, seed, prompt, more, piece, chunk, data):
    rhythm = Rhythm(16, 8)
    served, own = (Served("heavy_merge", rhythm, 8, middle=((30, 30), bits)) for _ in range(2))
    requests = [drawn(seed, prompt + more), drawn(seed + 1, 33)]
    found = run(served, requests, [3, 5], data, chunk, [prompt, 20], piece)[0]
    expected = run(own, requests[:1], [2], data, 40, [prompt], piece)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("middle", [None, ((20, 33), Bits(8, 8))], ids=["one part", "two"])
@pytest.mark.parametrize("at", [20, 40, 60])
def test_a_request_goes_on_from_the_copy_after_a_piece(middle, at):
    """A copy holds what the page held after a piece, and where it was compressed last."""
    rhythm = Rhythm(24, 8)
    served, own = (Served("heavy_merge", rhythm, 8, middle=middle) for _ in range(2))
    request, end = drawn(1, 70), drawn(2, 40)
    second = [torch.cat([a[:at], b]) for a, b in zip(request, end, strict=True)]
    starts, seen = np.array([0, 70]), np.zeros(1, dtype=np.int64)
    pages, copies = np.array([3]), Copies(np.array([-1]), np.array([7]), np.array([at]))
    states = served.blocks.states(pages, seen, rhythm)
    given = rhythm, 8, CPU, copies, served.middle, states, np.array([20])
    out = torch.empty_like(request[0])
    todo = rounds(starts, seen, pages, *given)
    compress_all(served.pages.attend(*request, served.held, todo, out))
    assert (int(states.copied[0]), int(states.last[0])) == (at, 70)
    served.blocks.put(np.array([7, 5]), np.array([at, at]), states.copied.repeat(2))
    start = Copies(*(np.array([n]) for n in (7, 0, 0)))
    (found,) = served.step([(5, at, [t[at:] for t in second])], start, [20])
    (expected,) = own.step([(5, 0, second)], pieces=[20])
    torch.testing.assert_close(found, expected[at:], rtol=1e-4, atol=1e-5)
    assert int(served.blocks.states(np.array([5]), np.array([at + 40]), rhythm).last[0]) > at


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_numbers_that_overflow_are_their_own_requests_loss(wrong):
    rhythm = Rhythm(24, 4)
    served, fresh = Served("heavy_merge", rhythm, 4), Served("heavy_merge", rhythm, 4)
    broken, good = drawn(1, 70), drawn(2, 70)
    for tensor in broken:
        tensor[30] = wrong
    _, found = served.step([(3, 0, broken), (4, 0, good)], pieces=[50, 50])
    (expected,) = fresh.step([(4, 0, good)], pieces=[50])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (again,) = served.step([(3, 0, good)], pieces=[50])
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_a_needle_that_the_last_queries_do_not_ask_for_is_kept():
    """A token that only queries at the start of a piece look at is kept unchanged: all queries of a
    piece score it, not only the last ones before the compression."""
    rhythm = Rhythm(40, 8)
    served = Served("heavy_merge", rhythm, 8)
    q, k, v = drawn(0, 300)
    k[100] = 6 * torch.nn.functional.normalize(torch.randn(KV, 8), dim=-1)
    q[3:5] = 4 * k[100].repeat_interleave(2, 0)
    served.step([(2, 0, (q, k, v))], pieces=[200])
    (page, _) = served.held
    kept = page.exact.fields["keys"][2, :, :32]
    assert bool((kept == k[100].unsqueeze(1)).all(-1).any(1).all())


def test_states_of_blocks():
    """A page of which nothing is known was compressed wherever it was full."""
    rhythm, blocks = Rhythm(24, 8), KnownPages()
    one, seen = np.array([5]), np.array([50])
    regular = States.regular(rhythm, seen)
    assert regular.last[0] == 48
    assert blocks.states(one, seen, rhythm).last[0] == 48
    blocks.put(one, seen, np.array([45]))
    known = blocks.states(one, seen, rhythm)
    assert (known.last[0], known.held(rhythm, seen)[0]) == (45, 21)
    assert blocks.states(one, np.array([49]), rhythm).last[0] == 48
    assert blocks.tokens(np.array([5, 6])).tolist() == [50, 0]
