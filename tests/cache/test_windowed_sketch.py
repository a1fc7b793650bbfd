"""Sinks and a recent window around a sketch: what a budget bounds, and the page in a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import Slots
from kvsketch.cache.sketch_page import SketchGroup, SketchPage
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.methods.registry import SKETCHES
from kvsketch.methods.sketches.base import token_bytes
from kvsketch.page.part import Part

NAMES = [name for name in SKETCHES if name != "one_dimensional"]


def tokens(n, seed=0, batch=1):
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, n, 4, generator=g) for _ in range(2))
    return Slots(keys, values, positions=torch.arange(float(n)).expand(batch, 2, n).contiguous())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(budget=st.integers(1, 120), sink=st.integers(0, 9), recent=st.integers(0, 50))
def test_a_budget_bounds_sinks_sketch_and_window_together(name, budget, sink, recent):
    """Sinks, sketch and recent window together fit the budget; only if not even the smallest sketch
    fits, nothing is taken."""
    build = SKETCHES[name].for_budget
    windowed = WindowedSketch(build, sink, recent, SKETCHES[name].least_slots)
    exact = tokens(150)
    parts = windowed.take(exact, budget)
    if parts is None:
        smallest = build(SKETCHES[name].least_slots).most_bytes(exact)
        assert smallest > budget * token_bytes(exact)
        return
    first, last = parts
    assert first.positions[0, 0].tolist() == list(range(first.count))
    assert last.positions[0, 0].tolist() == list(range(150 - last.count, 150))
    room = (budget - first.count - last.count) * token_bytes(exact)
    assert windowed.sketch.most_bytes(exact) <= room
    assert windowed.sketch.seen == 150 - first.count - last.count
    assert first.count + windowed.worth + last.count <= budget
    # sinks have priority over the window, and the smallest sketch over both
    least = -(-build(SKETCHES[name].least_slots).most_bytes(exact) // token_bytes(exact))
    assert first.count == min(sink, budget - least)
    assert last.count == min(recent, budget - least - first.count)


def test_a_budget_that_grows_makes_the_sketch_larger():
    windowed = WindowedSketch(SKETCHES["merge_reduce"].for_budget, 4, 8, 2)
    first, last = windowed.take(tokens(300), 60)
    before = windowed.worth
    more = Slots.cat([first, last, tokens(100, 1)])
    first, last = windowed.take(more, 120)
    assert (first.count, last.count) == (4, 8)
    assert 100 <= windowed.worth <= 108 > before
    assert windowed.sketch.most_bytes(more) <= 108 * token_bytes(more)
    windowed.take(Slots.cat([first, last, tokens(50, 2)]), 110)  # a sketch never shrinks
    assert windowed.worth >= 100


def test_rows_of_a_larger_batch_are_numbered_before_there_is_a_sketch():
    """Row 1 alone has the slots that it has beside row 0."""
    both, alone = tokens(200, batch=2), tokens(200, batch=2).map(lambda t: t[1:])
    found = []
    for slots, rows in ((both, None), (alone, torch.tensor([1]))):
        windowed = WindowedSketch(SKETCHES["merge_reduce"].for_budget, 2, 8, 2)
        if rows is not None:
            windowed.number_rows(rows)
        windowed.take(slots, 60)
        found.append(windowed.sketch.slots.map(lambda t: t[-1:]))
    for name, tensor in found[0].tensors().items():
        torch.testing.assert_close(found[1].tensors()[name], tensor)


def test_a_page_shows_the_tokens_in_order_and_keeps_no_copy():
    window = WindowedSketch(SKETCHES["sliding_window"].for_budget, 3, 7)
    window.sketch, window.worth = SKETCHES["sliding_window"].for_budget(12), 12
    slots = tokens(60)
    window.sketch.extend(slots.narrow(3, 50))
    exact = Slots.cat([slots.narrow(0, 3), slots.narrow(53, 7)])
    page = SketchPage([SketchGroup(Part(exact, None, 18), 3, window)], None, exact.keys.shape[:2])
    positions = page.slots.positions[0, 0].tolist()
    assert positions == [0, 1, 2, *range(42, 53), 0, *range(53, 60)]
    held = sum(t.nbytes for t in page.tensors())
    assert page.slots is not page.slots
    assert sum(t.nbytes for t in page.tensors()) == held
    page.append(tokens(1, 5))
    assert page.open() is page.open()
    assert sum(t.nbytes for t in page.tensors()) > held
    opened = page.open()
    page.release()
    assert page.open() is not opened
    page.release()
    assert sum(t.nbytes for t in page.tensors()) == held
