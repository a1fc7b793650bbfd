"""The page of a layer, whose heads may differ in size, and attention over it, against the
reference."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.attention import attend_to
from kvsketch.budget import Budget
from kvsketch.cache import Page, windowed
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.stream import Stream
from kvsketch.estimator import attend
from kvsketch.kernels import native, paged
from kvsketch.observed import Observed, causal
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits
from kvsketch.slots import Slots, compute_dtype

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.08, torch.float16: 0.01}


@pytest.fixture(scope="module", params=["compiled", "torch"])
def kernel(request):
    """Attention over a page is that of the compiled kernel, or of torch's."""
    if request.param == "compiled" and native.library() is None:
        pytest.skip(native.kernel())
    with native.switched(request.param == "compiled"):
        yield


def tokens(generator, batch, heads, n, dim, value_dim, dtype, weighted=False, positions=False):
    """Random slots; with masses, the sums are values in ``dtype`` times the mass."""
    keys = torch.randn(batch, heads, n, dim, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(batch, heads, n, value_dim, generator=generator, dtype=torch.float64)
    values = values.to(dtype)
    wide = compute_dtype(dtype)
    mass = torch.rand(batch, heads, n, generator=generator, dtype=wide) * 5 + 0.1
    place = torch.arange(n, dtype=torch.float64).expand(batch, heads, n) if positions else None
    if not weighted:
        return Slots(keys, values, positions=place)
    return Slots(keys, values.to(wide) * mass.unsqueeze(-1), mass, positions=place)


def page_of(slots, sizes, room):
    if sizes is None:
        return Part(slots, None, room)
    return Part(slots.only(torch.arange(slots.count) < sizes.unsqueeze(-1)), sizes, room)


def sizes_of(generator, batch, heads, n):
    sizes = torch.randint(1, n + 1, (batch, heads), generator=generator)
    sizes[0, 0] = n
    return sizes


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "n": st.integers(1, 90),
        "q": st.sampled_from([1, 1, 2, 7]),
        "dim": st.sampled_from([1, 5, 8, 16]),
        "same": st.booleans(),
        "ragged": st.booleans(),
        "weighted": st.booleans(),
    }
)


def drawn(shape, dtype, softcap, alibi, sunk):
    """Slots, the number of them in each head (None: all), new tokens and their queries."""
    s = shape
    g = torch.Generator().manual_seed(s["seed"])
    batch, heads, n, q, dim = s["batch"], s["heads"], s["n"], s["q"], s["dim"]
    value_dim = dim if s["same"] else dim + 3
    held = tokens(g, batch, heads, n, dim, value_dim, dtype, s["weighted"], alibi)
    new = tokens(g, batch, heads, q, dim, value_dim, dtype, False, alibi)
    if alibi:
        new = Slots(new.keys, new.values, positions=new.positions + n)
    sizes = sizes_of(g, batch, heads, n) if s["ragged"] else None
    every = heads * s["group"]
    asked = Observed(
        torch.randn(batch, every, q, dim, generator=g, dtype=torch.float64).to(dtype),
        0.4,
        softcap,
        torch.rand(every, generator=g, dtype=torch.float64) if alibi else None,
        None,
        torch.randn(every, generator=g, dtype=torch.float64) if sunk else None,
    )
    return held, sizes, new, asked


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    softcap=st.sampled_from([None, None, 3.0]),
    alibi=st.booleans(),
    sunk=st.booleans(),
)
def test_attention_over_a_page_equals_the_reference_head_by_head(
    dtype, shape, softcap, alibi, sunk
):
    """Attention over a page with appended tokens equals the reference, for sizes that are no powers
    of two and values whose head_dim differs from the keys'."""
    held, sizes, new, asked = drawn(shape, dtype, softcap, alibi, sunk)
    page = page_of(held, sizes, new.count + 3)
    page.append(new)
    out = attend_to(asked, [page])
    assert out.dtype == dtype
    for row, head in itertools.product(*map(range, held.keys.shape[:2])):
        count = held.count if sizes is None else int(sizes[row, head])
        mine = Slots.cat([held.narrow(0, count), new]).map(
            lambda t, r=row, h=head: t[r : r + 1, h : h + 1].double()
        )
        own = slice(head * shape["group"], (head + 1) * shape["group"])
        expected = attend(
            asked.queries[row : row + 1, own].double(),
            mine,
            scaling=0.4,
            softcap=softcap,
            mask=causal(new.count, count + new.count, torch.device("cpu")),
            slopes=None if asked.slopes is None else asked.slopes[own],
            sinks=None if asked.sinks is None else asked.sinks[own],
        )
        error = float((out[row : row + 1, own].double() - expected).abs().max())
        assert error < TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=80, deadline=None)
@given(
    shape=shapes,
    softcap=st.sampled_from([None, None, 3.0]),
    alibi=st.booleans(),
    sunk=st.booleans(),
    bits=st.sampled_from([Bits(8, 8), Bits(8, 4), Bits(4, 4)]),
    window=st.tuples(st.integers(0, 4), st.integers(0, 6)),
    piece=st.sampled_from([1, 300, 1 << 20]),
)
def test_attention_over_few_bits_is_that_over_what_they_say(
    dtype, shape, softcap, alibi, sunk, bits, window, piece
):
    """Attention over exact slots and slots in few bits, in pieces of any size, equals the reference
    over the dequantised slots."""
    held, sizes, new, asked = drawn(shape, dtype, softcap, alibi, sunk)
    if sizes is not None:
        held = held.only(torch.arange(held.count) < sizes.unsqueeze(-1))
    page = Page(held, sizes, new.count + 3, bits, *window)
    page.append(new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_PIECE", piece)
        out = attend_to(asked, page.open())
    assert out.dtype == dtype
    slots = page.read(exactly=True).map(lambda t: t.double())
    expected = attend(
        asked.queries.double(),
        slots,
        scaling=0.4,
        softcap=softcap,
        mask=causal(new.count, slots.count, torch.device("cpu")),
        slopes=asked.slopes,
        sinks=asked.sinks,
    )
    tolerance = {torch.float64: 2e-4, torch.float32: 5e-4, torch.bfloat16: 0.08}[dtype]
    error = float((out.double() - expected).abs().max())
    assert error < tolerance * max(1.0, float(expected.abs().max()))


def test_softmax_over_values_and_masses_divided_is_attention_over_slots():
    """Any attention kernel can compute attention over slots: with values [u, m], divided by the
    last column of the output, or with values u / m and a bias of log m."""
    g = torch.Generator().manual_seed(0)
    slots = tokens(g, 2, 3, 50, 8, 8, torch.float64, weighted=True)
    queries = torch.randn(2, 3, 4, 8, generator=g, dtype=torch.float64)
    expected = attend(queries, slots, scaling=1.0)
    weights = (queries @ slots.keys.mT).softmax(-1)
    both = weights @ torch.cat([slots.values, slots.mass.unsqueeze(-1)], dim=-1)
    torch.testing.assert_close(both[..., :-1] / both[..., -1:], expected, rtol=0, atol=1e-14)
    bias = (queries @ slots.keys.mT + slots.mass.log().unsqueeze(2)).softmax(-1)
    means = slots.values / slots.mass.unsqueeze(-1)
    torch.testing.assert_close(bias @ means, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["page", "quantized"])
@settings(max_examples=60, deadline=None)
@given(shape=shapes, scored=st.booleans())
def test_a_page_shows_its_slots_in_order_whatever_was_done_to_it(kind, shape, scored):
    """After tokens are appended and dropped, the page grown and rows selected, every head has its
    slots in order, the newest tokens last."""
    s = shape
    g = torch.Generator().manual_seed(s["seed"])
    batch, heads, n, q, dim = s["batch"], s["heads"], s["n"], s["q"], s["dim"]
    held = tokens(g, batch, heads, n, dim, dim, torch.float32, s["weighted"])
    if scored:
        held = Slots(
            held.keys, held.values, held.mass, score=torch.rand(batch, heads, n, generator=g)
        )
    sizes = sizes_of(g, batch, heads, n) if s["ragged"] else None
    page = page_of(held, sizes, q + 1)
    exact = {"rtol": 1e-5, "atol": 1e-5}
    if kind == "quantized":
        cut = held if sizes is None else held.only(torch.arange(n) < sizes.unsqueeze(-1))
        page = Page(cut, sizes, q + 1, Bits(8, 8), 2, 3)
        exact = {"rtol": 0.02, "atol": 0.1}
    new = tokens(g, batch, heads, q, dim, dim, torch.float32)
    page.append(new)
    page.append(new.narrow(0, 1))
    page.drop(1)

    def check(page, fn=lambda t: t):
        slots = page.slots
        for row, head in itertools.product(range(len(slots.keys)), range(heads)):
            source = int(fn(torch.arange(batch))[row])
            count = n if sizes is None else int(sizes[source, head])
            assert int(page.held[row, head]) == count + q
            for name in ("keys", "values", "mass", "score"):
                mine = getattr(slots, name)
                if mine is None:
                    continue
                empty = torch.zeros(batch, heads, q)
                behind = {"mass": empty + 1, "score": empty}
                before = held.masses() if name == "mass" else getattr(held, name)
                later = getattr(new, name) if name in ("keys", "values") else behind[name]
                wanted = torch.cat([before[source, head, :count], later[source, head]])
                found = mine[row, head, slots.count - count - q :]
                torch.testing.assert_close(found.float(), wanted.float(), **exact)
                if name == "mass":
                    assert float(mine[row, head, : slots.count - count - q].abs().sum()) == 0

    check(page)
    check(page.grown(5))
    order = torch.tensor([batch - 1, 0, 0])
    check(page.map(lambda t: t.index_select(0, order)), lambda t: t.index_select(0, order))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", [16, 8])
def test_tokens_after_a_compression_come_and_go(uneven, weighted, bits):
    """What follows a compression is all there in its order, with padding dead, and tokens that are
    taken back leave nothing to those that come after them. Attention to what is open is that over
    these slots."""
    g = torch.Generator().manual_seed(0)
    shares = [0.6, 1.4] if uneven else [1.0, 1.0]
    budgets = HeadBudgets([[Budget(40, share) for share in shares]])
    stream = Stream(windowed("streaming_llm", 2, 4), budgets, 20, bits=bits)
    stream.extend(tokens(g, 2, 2, 90, 8, 8, torch.float64, weighted))
    stream.settle(None, prefill=True)
    expected = stream.slots.map(torch.clone)
    changes = [(1, 0, 0), (3, 2, 0), (2, 1, 2), (2, 0, 1), (5, 2, 3), (5, 3, 1)]
    changes += [(2, 2, 2), (2, 0, 0), (60, 9, 0)]  # padding that is taken back, then tokens
    for q, padding, back in [*changes, (1, 0, 0), (1, 1, 0), (1, 0, 0)]:
        new = tokens(g, 2, 2, q, 8, 8, torch.float64)
        live = torch.ones(2, q, dtype=torch.bool)
        live[1, q - padding :] = False
        stream.extend(new)
        if padding:
            stream.mark_padding(live)
        stream.drop(back)
        left = q - back
        expected = Slots.cat([expected, new.only(live[:, None]).narrow(0, left)])
        if not left:
            continue
        now = stream.slots
        for one, other in ((now.values, expected.values), (now.masses(), expected.masses())):
            torch.testing.assert_close(one, other, check_dtype=False)
        there = expected.masses() > 0
        torch.testing.assert_close(now.keys[there], expected.keys[there])
        queries = torch.randn(2, 4, left, 8, generator=g, dtype=torch.float64)
        mask = causal(left, expected.count, torch.device("cpu"))
        out = attend_to(Observed(queries, 0.4), stream.open(), padded=True)
        wanted = attend(queries, expected, scaling=0.4, mask=mask)
        there = live[:, None, :left].expand(2, 4, left)
        torch.testing.assert_close(out[there], wanted[there], rtol=1e-3, atol=1e-4)
    assert stream.seen == 90 + sum(q - back for q, _, back in changes) + 3


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shares", [[1.0, 1.0], [0.6, 1.4]])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_chunk_without_room_counts_the_tokens_before_it(shares, bits):
    """Two decoded tokens and a chunk of three exceed the buffer of 4 slots, so that they are
    compressed, although the page had to grow for the chunk."""
    g = torch.Generator().manual_seed(0)
    budgets = HeadBudgets([[Budget(40, share) for share in shares]])
    stream = Stream(windowed("streaming_llm", 2, 4), budgets, 4, bits=bits)
    for q in (90, 1, 1, 3):
        stream.extend(tokens(g, 1, 2, q, 8, 8, torch.float32))
        stream.settle(None, prefill=q > 1)
    assert stream.held.tolist() == [[round(40 * share) for share in shares]]


@pytest.mark.parametrize(
    ("name", "bits", "shares", "after", "every"),
    [
        ("streaming_llm", 16, [1.0, 1.0], [28, 28], 16),
        ("streaming_llm", 16, [0.2, 1.8], [6, 60], 16),
        ("streaming_llm", 8, [1.0, 1.0], [36, 36], 8),
        ("sliding_window", 16, [0.6, 1.4], [24, 56], 8),
        ("subgen", 16, [0.6, 1.4], [23, 52], 8),
    ],
)
def test_decoding_compresses_every_few_buffers(name, bits, shares, after, every):
    """Decoding compresses to three buffers below the budget (in few bits one), but not below sinks
    and recent window. A sketch takes tokens every two buffers."""
    g = torch.Generator().manual_seed(0)
    budgets = HeadBudgets([[Budget(40, share) for share in shares]])
    stream = Stream(windowed(name, 2, 4), budgets, 4, bits=bits)
    steps = []
    for step in range(70):
        q = 90 if step == 0 else 1
        stream.extend(tokens(g, 1, 2, q, 8, 8, torch.float32))
        if stream.settle(None, prefill=step == 0) and step:
            steps.append(step)
            assert stream.held.tolist() == [after]
    assert steps == list(range(4, 70, every))


def test_a_prompt_that_fits_is_compressed_a_buffer_above_the_budget():
    g = torch.Generator().manual_seed(0)
    stream = Stream(windowed("streaming_llm", 2, 4), Budget(40), 4)
    while not stream.compressed:
        q = 1 if stream.seen else 38
        stream.extend(tokens(g, 1, 2, q, 8, 8, torch.float32))
        stream.settle(None, prefill=q > 1)
    assert stream.seen == 44


@pytest.mark.parametrize("bits", [16, 8])
def test_padding_takes_no_slots_of_heads_of_different_size(bits):
    g = torch.Generator().manual_seed(0)
    budgets = HeadBudgets([[Budget(40, share) for share in (0.6, 1.4)]])
    stream = Stream(windowed("knorm", 2, 4), budgets, bits=bits)
    stream.extend(tokens(g, 2, 2, 90, 8, 8, torch.float32))
    stream.mark_padding(torch.arange(90) >= torch.tensor([[0], [70]]))
    stream.settle(None, prefill=True)
    assert stream.held.tolist() == [[24, 56], [20, 20]]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bits", [16, 8])
def test_rows_that_change_places_take_the_sizes_of_their_heads_with_them(bits):
    """Rows whose heads differ in size are attended to as before after they have changed places."""
    g = torch.Generator().manual_seed(0)
    rows = [[Budget(300, share) for share in shares] for shares in ([0.5, 1.5], [1.6, 0.4])]
    stream = Stream(windowed("streaming_llm", 2, 4), HeadBudgets(rows, by_row=True), bits=bits)
    stream.extend(tokens(g, 2, 2, 600, 8, 8, torch.float32))
    stream.settle(None, prefill=True)
    stream.extend(tokens(g, 2, 2, 1, 8, 8, torch.float32))
    queries = torch.randn(2, 4, 1, 8, generator=g)
    before = attend_to(Observed(queries, 0.4), stream.open())
    torch.testing.assert_close(before, attend(queries, stream.slots, scaling=0.4))
    stream.map_batch(lambda t: t.flip(0))
    assert stream.held.tolist() == [[481, 121], [151, 451]]
    after = attend_to(Observed(queries.flip(0), 0.4), stream.open())
    torch.testing.assert_close(after, before.flip(0))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("ragged", [False, True])
def test_dead_slots_do_not_even_shift_the_softmax(ragged):
    """Dead slots with scores far above the others do not change attention; a row of dead slots
    gives 0."""
    g = torch.Generator().manual_seed(0)
    held = tokens(g, 2, 2, 20, 8, 8, torch.float32, weighted=True)
    held.keys[:, :, :5] = 100.0
    live = torch.arange(20) >= torch.tensor([[[5]], [[20]]])
    sizes = torch.tensor([[20, 12], [20, 9]]) if ragged else None
    page = page_of(held.only(live.expand(2, 2, 20)), sizes, 1)
    queries = torch.rand(2, 4, 1, 8, generator=g) + 1
    out = attend_to(Observed(queries, 1.0), [page], padded=True)
    alive = page.slots.only(page.slots.masses() > 0).map(lambda t: t.double())
    torch.testing.assert_close(
        out.double(), attend(queries.double(), alive, scaling=1.0), rtol=1e-4, atol=1e-5
    )
    assert float(out[1].abs().max()) == 0


def test_survivors_do_not_drift_in_bfloat16():
    """A page stores u / m, so that slots read and written again a hundred times do not change."""
    g = torch.Generator().manual_seed(0)
    page = Part(tokens(g, 1, 2, 40, 8, 8, torch.bfloat16, weighted=True))
    first = {name: tensor.clone() for name, tensor in page.fields.items()}
    for _ in range(100):
        page = Part(page.slots, dtype=torch.bfloat16)
    for name, tensor in page.fields.items():
        assert torch.equal(tensor, first[name])
    assert page.fields["values"].dtype == torch.bfloat16


def test_heads_of_different_size_take_what_they_need():
    """Heads of different size take at most 8% more bytes than their slots (blocks have about a
    thirty-second of the mean size), not the size of the largest."""
    g = torch.Generator().manual_seed(0)
    held = tokens(g, 1, 8, 4000, 32, 32, torch.bfloat16)
    sizes = torch.tensor([[4000, 100, 300, 50, 2000, 700, 60, 800]])
    page = page_of(held, sizes, 20)
    per_slot = 2 * (32 + 32) + 4
    needed = int((sizes + 20).sum()) * per_slot
    assert sum(t.nbytes for t in page.tensors()) <= 1.08 * needed


IN_TRITON = """
import torch
from kvsketch.attention import attend_to
from kvsketch.page.page import Page
from kvsketch.page.quantized import Bits
from kvsketch.kernels import paged, triton_support
from kvsketch.observed import Observed
from kvsketch.slots import Slots
from test_page import page_of, sizes_of, tokens

generator = torch.Generator().manual_seed(0)
for ragged, bits in ((False, None), (True, None), (False, Bits(8, 4)), (True, Bits(4, 8))):
    for sinks, slopes in ((None, None), (torch.randn(4, generator=generator), None),
                          (None, torch.rand(4, generator=generator))):
        held = tokens(generator, 2, 2, 40, 8, 8, torch.float32, True, slopes is not None)
        sizes = sizes_of(generator, 2, 2, 40) if ragged else None
        page = page_of(held, sizes, 5)
        if bits is not None:
            page = Page(page.slots if sizes is None else held, sizes, 5, bits, 2, 3)
        for step, q in enumerate((1, 1) if slopes is not None else (1, 3, 1)):
            new = tokens(generator, 2, 2, q, 8, 8, torch.float32, False, slopes is not None)
            if slopes is not None:
                new = Slots(new.keys, new.values, positions=new.positions + 40 + step)
            page.append(new)
            queries = torch.randn(2, 4, q, 8, generator=generator)
            asked = Observed(queries, 0.4, None, slopes, None, sinks)
            triton_support.DEVICES.clear()
            held_now = [page] if bits is None else page.open()
            expected = attend_to(asked, held_now)
            triton_support.DEVICES.add("cpu")
            assert paged.triton_fits(asked)
            torch.testing.assert_close(attend_to(asked, held_now), expected, rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_the_gpu_s_kernel_reads_a_page_as_the_cpu_s_does():
    """In Triton's interpreter the GPU's kernel gives the CPU's output while tokens are appended."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-c", IN_TRITON],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.strip() == "equal", found.stderr


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), fewer=st.integers(0, 12), moved=st.booleans())
def test_a_page_is_refilled_where_it_is(ragged, weighted, seed, fewer, moved):
    """A refilled page equals a new page of the same slots, also where these are views of its own
    tensors."""
    g = torch.Generator().manual_seed(seed)
    batch, heads, n, room = 2, 2, 40, 6
    sizes = torch.randint(20, n + 1, (batch, heads), generator=g) if ragged else None
    page = page_of(tokens(g, batch, heads, n, 4, 4, torch.float32, weighted), sizes, room)
    page.append(tokens(g, batch, heads, room, 4, 4, torch.float32))
    page.spans()
    now = page.slots
    if ragged:
        left, first = sizes - fewer, int(page.count)
        start = first - page.held + (6 if moved else 0)
        index = torch.arange(int(left.max())) + start.unsqueeze(-1)
        slots = now.take(index.clamp(max=first - 1))
        slots = slots.only(torch.arange(slots.count) < left.unsqueeze(-1))
    else:
        left = None
        slots = now.narrow(6 if moved else 0, n - fewer)
    expected = Part(slots.map(torch.clone), left, room + fewer)
    before = {name: tensor.data_ptr() for name, tensor in page.fields.items()}
    found = page.refilled(slots, left, room + fewer)
    for _ in range(2):  # the second time with a token appended
        for name, tensor in expected.slots.tensors().items():
            assert torch.equal(getattr(found.slots, name), tensor), name
        assert torch.equal(found.held, expected.held)
        assert torch.equal(found.spans()[1], found.held)
        for one in (found, expected):
            again = torch.Generator().manual_seed(1)
            one.append(tokens(again, batch, heads, 1, 4, 4, torch.float32))
    if not ragged:
        assert {name: tensor.data_ptr() for name, tensor in found.fields.items()} == before


@pytest.mark.parametrize("allocation", ["even", "schedule"])
@pytest.mark.parametrize("method", ["streaming_llm", "snapkv", "heavy_merge"])
def test_nothing_moves_while_decoding(method, allocation):
    """All decoded tokens are written into the same tensors, over several compressions, as a
    recorded CUDA graph of a decode step requires."""
    g = torch.Generator().manual_seed(0)
    budgets = [[0.5, 1.5]] if allocation == "schedule" else [[1.0, 1.0]]
    stream = Stream(
        windowed(method, 2, 8), HeadBudgets([[Budget(64, share) for share in budgets[0]]]), 2
    )
    places, page, pages = [], None, 0
    for step in range(60):
        q = 200 if step == 0 else 1
        stream.extend(tokens(g, 1, 2, q, 8, 8, torch.float32))
        stream.settle(Observed(torch.randn(1, 4, q, 8, generator=g), 0.3), prefill=step == 0)
        pages += stream.page is not page
        page = stream.page
        if step:
            places.append({n: t.data_ptr() for n, t in stream.page.exact.fields.items()})
    assert pages > 5  # there were several compressions
    assert all(place == places[0] for place in places)
