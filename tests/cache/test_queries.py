"""Queries that wait for a compression, and the scores that they become."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.queries import Queries, side_by_side
from kvsketch.cache.solvers import price_of
from kvsketch.cache.stream import Stream
from kvsketch.cache.window import windowed
from kvsketch.kernels import cpu, native
from kvsketch.observed import Observed
from kvsketch.page.quantized import Bits
from kvsketch.page.ragged import picked
from kvsketch.slots import Slots


def read(stream: Stream, tokens: int, seed: int = 0) -> Observed:
    """Let a stream read a prompt of random tokens; returns its queries."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, tokens, 8, generator=generator)
    stream.extend(Slots(keys, values))
    return Observed(torch.randn(2, 4, tokens, 8, generator=generator), 0.5)


def test_queries_of_a_second_reading_are_all_kept():
    """They are a sample of the context, and none is the last."""
    asked = Observed(torch.randn(1, 2, 9, 4), 0.5)
    first, second = Queries(), Queries()
    first.add(asked)
    first.keep_last(3)
    second.add(replace(asked, after=True))
    second.keep_last(3)
    assert (first.count, second.count) == (3, 9)
    first.keep_last(0)
    assert first.all() is None


def test_queries_count_once():
    """The queries that a compression has scored are gone after it."""
    stream = Stream(windowed("h2o", 2, 6), Budget(20), 2)
    asked = read(stream, 30)
    assert stream.settle(asked, prefill=True)
    assert stream.scores.queries.count == 0
    before = stream.slots.score.clone()
    stream.scores.fold(stream.page)
    assert torch.equal(stream.slots.score, before)


def test_padding_has_no_importance():
    stream = Stream(windowed("h2o", 2, 6), Budget(200), 2)
    asked = read(stream, 30)
    live = torch.ones(2, 30, dtype=torch.bool)
    live[0, :7] = False
    stream.mark_padding(live)
    stream.settle(replace(asked, live=live), prefill=True)
    found = stream.scores.importance(stream.slots)
    assert bool((found[0, :, :7] == -torch.inf).all())
    assert bool(found[0, :, 7:].isfinite().all())
    assert bool(found[1].isfinite().all())


def test_a_score_has_its_price():
    """Four bytes for the mass of every slot, and four more for a score if the method has one."""
    prices = []
    for method in ("streaming_llm", "snapkv"):
        stream = Stream(windowed(method, 2, 6), Budget(20), 2)
        read(stream, 30)
        prices.append(price_of(stream, Bits(4, 4), None))
    token = 2 * 8 * 4  # keys and values in float32
    assert prices[1].slot - prices[0].slot == pytest.approx(4 / token)
    assert prices[1].whole - prices[0].whole == pytest.approx(4 / token)


def test_dead_slots_that_are_picked_have_no_score():
    slots = Slots(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2), score=torch.ones(1, 1, 4))
    there = torch.tensor([[[True, False, True]]])
    found = picked(slots, torch.tensor([[[2, 1, 0]]]), there)
    assert found.score.tolist() == [[[1.0, 0.0, 1.0]]]
    assert found.masses().tolist() == [[[1.0, 0.0, 1.0]]]


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("shares", [[1.0, 1.0], [0.6, 1.4]])
def test_queries_become_scores_where_the_slots_are(shares, bits, monkeypatch):
    """With the compiled kernel as without it, also in the compression that follows."""
    if native.library() is None:
        pytest.skip(native.kernel())
    budgets = HeadBudgets([[Budget(60, share) for share in shares]])
    held = Stream(windowed("heavy_merge", 4, 8), budgets, bits=bits)
    held.settle(read(held, 200), prefill=True)
    generator = torch.Generator().manual_seed(1)
    twin, other = copy.deepcopy(held), copy.deepcopy(held)
    calls = []
    receive = cpu.receive
    monkeypatch.setattr(cpu, "receive", lambda *a: calls.append(receive(*a)) or calls[-1])
    for number in range(12):
        keys, values = torch.randn(2, 2, 2, 1, 8, generator=generator)
        asked = Observed(torch.randn(2, 4, 1, 8, generator=generator), 0.5)
        for stream in (held, twin, other):
            with native.switched(stream is held):
                stream.extend(Slots(keys, values))
                stream.settle(asked, prefill=False)
                if number % 3 == 2:
                    stream.scores.fold(stream.page)
    assert any(calls)
    assert held.scores.queries.count == twin.scores.queries.count
    assert held.slots.count == twin.slots.count
    torch.testing.assert_close(held.slots.score, twin.slots.score, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(held.slots.keys, twin.slots.keys, rtol=1e-3, atol=1e-3)
    assert torch.equal(twin.slots.score, other.slots.score)


def test_queries_of_layers_that_share_keys():
    """Heads of a KV head side by side; of the second layer, those of the last two tokens alone."""
    first, second = torch.randn(2, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    found = side_by_side([Observed(first, 1.0), Observed(second[:, :, -2:], 1.0)], 2)
    assert found is not None
    grouped = found.queries.view(1, 2, 2, 2, 6, 8)  # KV heads, layers, heads of a KV head
    assert torch.equal(grouped[:, :, 0].flatten(1, 2), first)
    assert torch.equal(grouped[:, :, 1].flatten(1, 2)[:, :, -2:], second[:, :, -2:])
    assert torch.equal(grouped[:, :, 1].flatten(1, 2)[:, :, :-2], first[:, :, :-2])
