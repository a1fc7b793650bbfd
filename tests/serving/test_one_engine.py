"""The same method, budget, bits and seed keep the same slots in transformers' streaming prefill and
in pages of vLLM, to the bit, after every compression of a prompt in pieces and of an answer."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvsketch.budget import Budget
from kvsketch.cache import stream as stream_module
from kvsketch.cache import together
from kvsketch.cache.compress import compress_newest
from kvsketch.cache.stream import Stream
from kvsketch.cache.window import windowed
from kvsketch.kernels import native
from kvsketch.observed import Observed
from kvsketch.page.memory import rows_of
from kvsketch.page.quantized import Bits
from kvsketch.page.schedule import Schedule
from kvsketch.slots import Slots
from tests.serving.served import KV, Served, drawn, queries_of

BUDGET, BUFFER, PIECE = 40, 3, 48
METHODS = ["streaming_llm", "heavy_merge", "cluster_merge", "h2o", "tova", "snapkv", "keydiff"]
METHODS += ["knorm", "balancekv", "uniform"]


def streamed(stream: Stream, request: list[torch.Tensor], sizes: list[int]) -> list[Slots]:
    """The slots after every compression of a stream that reads a request in chunks."""
    found, at = [], 0
    for size in sizes:
        q, k, v = (t[at : at + size].transpose(0, 1)[None] for t in request)
        stream.extend(Slots(k, v))
        pieces = stream.pace.cuts(stream.seen, size)
        stream.drop(size)
        start = 0
        for piece in pieces:
            stream.extend(Slots(k, v).narrow(start, piece))
            asked = Observed(q, 0.5).narrow(start, piece)
            before = stream.seen
            if stream.settle(asked, prefill=size > 1):
                found.append((before, stream.page.map(torch.clone).slots))
            start += piece
        at += size
    return found


def kept_in(served: Served, row: int, held: int) -> Slots:
    """The slots of a page of a serving engine, in the order of their tokens."""
    page, rows = served.held[0], torch.tensor([row])
    window = rows_of(page.exact, rows, held).read()
    if page.middle is None:
        return window
    middle = rows_of(page.middle, rows).read(window.keys.dtype)
    parts = [window.narrow(0, 2), middle, window.narrow(2, held - 2)]
    together = Slots.cat(parts)
    return together.take((together.masses() != 0).long().argsort(dim=-1, stable=True))


def cut_up(seen: int, until: int, generator: torch.Generator, piece: int) -> list[int]:
    """Random sizes of chunks from ``seen`` to ``until`` that end at multiples of ``piece``, but for
    the last."""
    ends = [*range((seen // piece + 1) * piece, until, piece), until]
    some = torch.rand(len(ends), generator=generator).lt(0.5).tolist()
    chosen = [end for end, is_ in zip(ends, some, strict=True) if is_ or end == until]
    return [end - start for start, end in zip([seen, *chosen], chosen, strict=False)]


#: every method with every prompt, dtype and number of bits, and all pairs of the last three
CASES = [
    (prompt, method, dtype, (16, 8, 4)[(i + j + k) % 3])
    for i, prompt in enumerate((2 * PIECE + 9, 2 * PIECE + 1, BUDGET - 1, 3))
    for j, method in enumerate(METHODS)
    for k, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("prompt", "method", "dtype", "bits"), CASES)
def test_slots_are_equal_to_the_bit(prompt, method, dtype, bits):
    """Of a prompt that ends with a piece, with a single token behind one, within the budget, and
    before a layer is full."""
    assert_equal(prompt, method, dtype, bits, BUDGET, PIECE)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "bits"), [("heavy_merge", 4), ("heavy_merge", 8), ("h2o", 8)])
def test_large_pages_are_equal_to_the_bit(method, bits, dtype, compiled):
    """Of which decoded tokens are compressed with the slots of the lowest scores alone."""
    with (
        native.switched(compiled),
        mock.patch.object(together, "compress_newest", wraps=together.compress_newest) as served,
        mock.patch.object(stream_module, "compress_newest", wraps=compress_newest) as streamed,
    ):
        assert_equal(700, method, dtype, bits, 600, 256)
    assert served.call_count == streamed.call_count == 2


def assert_equal(prompt, method, dtype, bits, budget, piece):
    """The slots of a request in both, after each compression."""
    generator = torch.Generator().manual_seed(METHODS.index(method))
    rhythm = Schedule(2, 6, BUFFER, bits != 16).rhythm(budget)
    last = prompt - (prompt % piece == 1)  # a piece of one token is decoded
    decoded = [last + rhythm.every, last + 2 * rhythm.every]
    if prompt < rhythm.first:
        decoded = [rhythm.slots, rhythm.slots + rhythm.every]
    answer, turn = decoded[-1] + 1 - prompt, 50
    tokens = prompt + answer + turn
    request = [t.to(dtype) for t in drawn(bits, tokens)]
    middle = None if bits == 16 else ((rhythm.middle,) * KV, Bits(bits, bits))
    served = Served(method, rhythm, queries_of(method, rhythm), None, dtype, middle)
    stream = Stream(windowed(method, 2, 6), Budget(budget), BUFFER, bits=bits, streaming=True)
    stream.pace.piece = piece
    begun, until = prompt + answer, tokens
    sizes = [*cut_up(0, prompt, generator, piece), *[1] * answer]
    sizes += cut_up(begun, until, generator, piece)
    found = streamed(stream, request, sizes)
    ends = {end for end in range(piece, until, piece) if end < prompt or end > begun}
    ends |= {prompt} if prompt == last > rhythm.first else set()
    assert [at for at, _ in found] == sorted({*ends, *decoded, until})
    seen = 0
    for at, slots in found:
        for end, whole in ((min(at, prompt), True), (min(at, begun), False), (at, True)):
            sizes = [1] * (end - seen)
            if whole and seen < end:
                sizes = cut_up(seen, end, generator, piece)
            for size in sizes:
                part = [t[seen : seen + size] for t in request]
                served.step([(4, seen, part)], pieces=[piece if whole else 0])
                seen += size
        other = kept_in(served, 4, rhythm.slots - rhythm.every)
        theirs, ours = other.masses() != 0, slots.masses() != 0
        assert torch.equal(theirs.sum(-1), ours.sum(-1))
        assert torch.equal(slots.masses()[ours].float(), other.masses()[theirs].float())
        for name in ("keys", "values", "score"):
            if getattr(slots, name) is not None:
                mine, served_ones = getattr(slots, name)[ours], getattr(other, name)[theirs]
                assert torch.equal(mine.float(), served_ones.float()), (name, at)
