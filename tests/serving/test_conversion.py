"""Slots of a file in the pages of an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served import KV, METHODS, Served, drawn

from kvsketch.attention import attend_to
from kvsketch.errors import InputError
from kvsketch.observed import Observed
from kvsketch.page.kind import Kind
from kvsketch.page.layout import Layout
from kvsketch.page.page import Page
from kvsketch.page.quantized import Bits
from kvsketch.slots import Slots
from kvsketch.state import Reader
from kvsketch.vllm.conversion import Converted, converted, page_of
from kvsketch.vllm.saved import Saved
from kvsketch.vllm.settings import PageSettings

HEADS, GROUP, DIM, CONTEXT = 3, 2, 8, 4000
ALL = slice(0, HEADS)


def slots_of(sizes: list[int], seed: int = 0) -> tuple[Slots, torch.Tensor | None]:
    """Slots of heads of these sizes, each head's own first, and the sizes if they differ."""
    g = torch.Generator().manual_seed(seed)
    most = max(sizes)
    keys, values = torch.randn(2, 1, len(sizes), most, DIM, generator=g)
    mass = torch.randint(1, 9, (1, len(sizes), most), generator=g).float()
    score = torch.rand(1, len(sizes), most, generator=g)
    own = torch.arange(most) < torch.tensor([sizes])[..., None]
    slots = Slots(keys, values * mass[..., None], mass, score=score)
    each = None if len(set(sizes)) == 1 else torch.tensor([sizes])
    return slots.map(lambda t: t * own.view(*own.shape, *[1] * (t.dim() - 3))), each


def document(
    sizes: list[int], bits: int = 16, room: int = 0, dtype: torch.dtype = torch.float32
) -> Page:
    slots, each = slots_of(sizes)
    slots = replace(slots, keys=slots.keys.to(dtype))
    return Page(slots, each, room, Bits(bits, bits), 4, 32)


def layout_of(given: PageSettings, sizes: list[int] | None = None, heads: int = HEADS) -> Layout:
    return given.layout(CONTEXT, heads, GROUP, DIM, torch.float32, sizes)


def convert(
    page: Page, given: PageSettings, layout: Layout, seen: int = 3000, heads: slice = ALL
) -> tuple[Converted, Page]:
    """A document, and the page that it becomes."""
    found = converted(Saved(seen, True, [page], [None]), {0: layout}, heads, given, CONTEXT)
    return found, layout.views(found.rows[0][None])[0]


def live_of(slots: Slots, head: int) -> Slots:
    """The slots of a head that are not dead, in order."""
    live = slots.masses()[0, head] != 0
    return slots.map(lambda t: t[:, head : head + 1, live])


def in_order(page: Page, head: int, window: int) -> Slots:
    """The slots of a head of an engine's page, in the order of their tokens."""
    exact = live_of(page.exact.read(torch.float32).narrow(0, window), head)
    if page.middle is None:
        return exact
    middle = live_of(page.middle.read(torch.float32), head)
    rest = exact.count - 4
    return Slots.cat([exact.narrow(0, 4), middle, exact.narrow(4, rest)]) if rest > 0 else exact


def same(one: Slots, other: Slots) -> None:
    for name in ("keys", "mass", "score"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    torch.testing.assert_close(one.values, other.values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("sizes", [[450] * 3, [450, 60, 300], [20, 450, 3]])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_fit_are_written_to_the_bit(bits, sizes, wide, dtype):
    """In pages whose heads are of the same size, or of different ones. Slots in few bits are not
    rounded to the dtype of the model."""
    given = PageSettings("heavy_merge", 500, bits=bits)
    layout = layout_of(given, [460, 90, 430] if wide else None)
    if wide and sizes[1] > 126:
        sizes = [sizes[0], 126, sizes[2]]
    page = document(sizes, bits, dtype=dtype)
    found, written = convert(page, given, layout)
    rhythm = given.rhythm(CONTEXT)
    first = rhythm.slots - rhythm.every
    assert found.last == 3000
    assert found.squeezed == ""
    before = page.read(exactly=True)
    for head in range(HEADS):
        same(live_of(before, head), in_order(written, head, first))
    assert bool((written.exact.fields["log_mass"][:, :, first:] < -1e20).all())


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from([16, 8, 4]),
    own=st.sampled_from([16, 8, 4]),
    sizes=st.lists(st.integers(1, 400), min_size=HEADS, max_size=HEADS),
    seen=st.integers(400, 3000),
)
def test_attention_over_the_page_is_that_over_the_file(bits, own, sizes, seen):
    given = PageSettings("heavy_merge", 500, bits=bits)
    page = document(sizes, own)
    found, written = convert(page, given, layout_of(given), seen)
    g = torch.Generator().manual_seed(1)
    asked = Observed(torch.randn(1, HEADS * GROUP, 5, DIM, generator=g), 0.3, after=True)
    expected, out = (attend_to(asked, one.read(exactly=True)) for one in (page, gathered(written)))
    close = {16: 1e-5, 8: 0.03, 4: 0.5}[bits if bits < own else 16]
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    if found.last == 0:
        assert found.squeezed == ""


def gathered(page: Page) -> Page:
    """All slots of a page in one part."""
    parts = [part.read(torch.float32) for part in page.open()]
    return Page(Slots.cat(parts))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("tokens", "whole"), [(21, True), (22, True), (23, False), (45, False)])
def test_a_short_document_is_in_the_window(bits, tokens, whole):
    """As long as it leaves room for the queries before the first compression."""
    given = PageSettings("heavy_merge", 40 if bits == 16 else 60, 2, 6, buffer=5, bits=bits)
    layout, rhythm = layout_of(given), given.rhythm(CONTEXT)
    assert rhythm.slots - layout.queries == {16: 25, 8: 8}[bits]
    tokens += {16: 3, 8: -14}[bits]
    page = document([tokens] * HEADS)
    found, written = convert(page, given, layout, tokens)
    assert (found.last == 0) == whole
    if whole:
        assert found.squeezed == ""
        same(page.read(exactly=True), written.exact.read(torch.float32).narrow(0, tokens))
        assert bool((written.exact.fields["log_mass"][:, :, tokens:] < -1e20).all())


def test_the_exact_page_takes_every_document():
    given = PageSettings("exact")
    page = document([450, 60, 300])
    found, written = convert(page, given, layout_of(given))
    assert found.last == 0
    for head in range(HEADS):
        kept = live_of(written.exact.read(torch.float32), head)
        kept = replace(kept, score=live_of(page.read(exactly=True), head).score)
        same(live_of(page.read(exactly=True), head), kept)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_heads_of_a_rank_are_those_of_the_whole(bits):
    given = PageSettings("heavy_merge", 500, bits=bits)
    page = document([450, 60, 300], bits)
    _, whole = convert(page, given, layout_of(given))
    _, part = convert(page, given, layout_of(given, heads=1), heads=slice(1, 2))
    for one, other in zip(whole.open(), part.open(), strict=True):
        for name, tensor in other.fields.items():
            assert torch.equal(one.fields[name][:, 1:2], tensor), name
        for name, few in other.packed.items():
            for a, b in zip(one.packed[name].tensors(), few.tensors(), strict=True):
                assert torch.equal(a[:, 1:2], b), name


@pytest.mark.parametrize(
    ("sizes", "own", "bits", "said"),
    [
        ([450, 700, 20], 16, 16, "layer 0: 700 slots for 464 in a page"),
        ([450, 700, 20], 8, 8, "layer 0: 700 slots for 488 in a page"),
        ([450] * 3, 16, 8, "layer 0: slots in 16 bits for 8 in a page"),
        ([450] * 3, 8, 4, "layer 0: slots in 8 bits for 4 in a page"),
        ([450] * 3, 4, 8, ""),
        ([450] * 3, 4, 16, ""),
    ],
)
def test_what_does_not_fit_is_squeezed(sizes, own, bits, said):
    given = PageSettings("heavy_merge", 500, bits=bits)
    page = document(sizes, own)
    found, written = convert(page, given, layout_of(given))
    assert found.squeezed == said
    mass = sum(part.read(torch.float32).masses().sum(-1) for part in written.open())
    expected = page.read(exactly=True).masses().sum(-1)
    torch.testing.assert_close(mass, expected, rtol=1e-4, atol=0)
    again, _ = convert(page, given, layout_of(given))
    assert torch.equal(found.rows[0], again.rows[0])


def test_appended_tokens_are_part_of_the_document():
    page = document([300] * HEADS, 8, room=9)
    more, _ = slots_of([9] * HEADS, seed=1)
    page.append(more)
    given = PageSettings("heavy_merge", 500, bits=8)
    _, written = convert(page, given, layout_of(given))
    mass = sum(part.read(torch.float32).masses().sum(-1) for part in written.open())
    torch.testing.assert_close(mass, page.read(exactly=True).masses().sum(-1))


def test_other_shapes_are_refused():
    given = PageSettings("heavy_merge", 500)
    with pytest.raises(InputError, match="another shape"):
        convert(document([40] * HEADS), given, layout_of(given), heads=slice(2, 4))


@pytest.mark.parametrize("sizes", [None, (40, 9)])
@pytest.mark.parametrize("bits", [16, 8, 4])
@settings(max_examples=12, deadline=None)
@given(
    method=st.sampled_from([*METHODS, "knorm", "exact"]),
    tokens=st.integers(1, 160),
    piece=st.sampled_from([0, 30]),
    ahead=st.booleans(),
)
@example(method="h2o", tokens=45, piece=30, ahead=False)  # scored, but not yet compressed
def test_a_page_that_was_saved_goes_on_where_it_was(bits, sizes, method, tokens, piece, ahead):
    """With the same numbers, and so with the same compressions, as one that never stopped. A step
    may have been ahead, whose token is left out unless the page was compressed there."""
    many = {} if method == "exact" else {"budget": 60, "bits": bits, "buffer": 5}
    own = PageSettings(method, sink=2, recent=6, **many)
    if sizes is not None and method != "exact":
        object.__setattr__(own, "allocation", "curves.json")  # of which only the sizes are used
    rhythm, queries = own.rhythm(CONTEXT), own.queries(CONTEXT)
    layout = own.layout(CONTEXT, KV, 2, DIM, torch.float32, sizes if own.allocation else None)
    middle = (layout.middle, layout.bits) if layout.middle else None
    name = None if method == "exact" else method
    first, second, third = (Served(name, rhythm, queries, middle=middle) for _ in range(3))
    assert first.layout == layout
    request = drawn(tokens, tokens + 70)
    start, rest = [t[:tokens] for t in request], [t[tokens:] for t in request]
    for one in (first, third):
        one.step([(3, 0, start)], pieces=[0 if method == "exact" else piece])
    last = first.blocks.state(3)[1]
    third.step([(3, tokens, [t[:1] for t in rest])])
    ahead &= third.blocks.state(3)[1] == last
    row = torch.zeros(layout.bytes, dtype=torch.uint8)
    move((third if ahead else first).parts(), 3, tensors_of(layout, row), 0)
    page, asked = page_of(row, layout, last, tokens, own, CONTEXT)
    page = Page.from_state(Reader(page.to_state()), Kind(1, KV, DIM, DIM, torch.float32))
    saved = Saved(tokens, not page.exact.grows, [page], [asked])
    found = converted(saved, {0: layout}, slice(0, KV), own, CONTEXT)
    assert (found.tokens, found.last, found.squeezed) == (tokens, last, "")
    one = own.layout(CONTEXT, 1, 2, DIM, torch.float32, list(layout.middle[1:]) or None)
    part = converted(saved, {0: one}, slice(1, 2), own, CONTEXT, rank=1)
    assert torch.equal(tensors_of(one, part.rows[0])[0][:, :, : asked.shape[2]], asked[:, 2:])
    move(tensors_of(layout, found.rows[0]), 0, second.parts(), 5)
    second.blocks.put(np.array([5]), np.array([tokens]), np.array([last]))
    (expected,), (out,) = first.step([(3, tokens, rest)]), second.step([(5, tokens, rest)])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def tensors_of(layout: Layout, row: torch.Tensor) -> list[torch.Tensor]:
    page, waiting = layout.views(row[None])
    return [waiting, *(tensor for part in page.open() for tensor in part.contents())]


def move(source: list[torch.Tensor], page: int, target: list[torch.Tensor], to: int) -> None:
    for one, other in zip(source, target, strict=True):
        other[to] = one[page]
