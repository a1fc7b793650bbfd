"""The state of a stream, without the arguments that it was made with."""

from __future__ import annotations

from typing import Any

import torch

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.kind import Kind
from kvsketch.cache.page import Page
from kvsketch.cache.quantized_page import QuantizedPage
from kvsketch.cache.sketch_page import SketchPage, SketchPages
from kvsketch.cache.storage import FULL, Bits
from kvsketch.cache.stream import Stream
from kvsketch.cache.tokens import Tokens
from kvsketch.cache.window import Windowed
from kvsketch.state import Reader, State

#: the kinds of pages, by their name in a state
_PAGES: dict[str, Any] = {
    "tokens": Tokens,
    "page": Page,
    "quantized": QuantizedPage,
    "sketch": SketchPage,
    "sketches": SketchPages,
}


def stream_state(stream: Stream) -> State:
    """The state of a stream: its page, its budget if a plan has given it, waiting queries, measured
    errors, and the state of its method.

    Raises:
        UnsupportedError: its state cannot be restored.
    """
    page = stream.page
    (form,) = (name for name, cls in _PAGES.items() if type(page) is cls)
    state = State(
        values={
            "seen": stream.seen,
            "padded": stream.padded,
            "bits": list(stream.bits),
            "bytes": stream._bytes,
            "left": stream._limit - (0 if isinstance(page, Tokens) else page.appended),
            "form": form,
        }
    )
    state.put("page", page.to_state())
    if stream._given is None and stream.budget is not None:
        state.put("budget", stream.budget.to_state())
    state.put("queries", stream.queries.to_state())
    state.put("errors", stream.errors.to_state())
    if isinstance(stream.method, Windowed):  # a sketch is part of its page
        state.put("method", stream.method.compressor.to_state())
    return state


def restore(stream: Stream, reader: Reader, kind: Kind, most: int | None) -> None:
    """Take in what ``stream_state`` said, into an empty stream made with the same arguments.

    Args:
        kind: what the tokens have in common.
        most: tokens the model has positions for; None: no limit.

    Raises:
        InputError: tensors or numbers that are inconsistent or do not fit the stream.
    """
    method = stream.method
    seen = reader.whole("seen", 1, most or 1 << 31)
    stream.padded = reader.flag("padded")
    bits = reader.anything("bits")
    if not isinstance(bits, list) or bits not in ([16, 16], [8, 8], [8, 4], [4, 8], [4, 4]):
        raise reader.wrong("bits", bits, "two of 16, 8 and 4")
    stream._store(Bits(*bits))
    sketch = not isinstance(method, Windowed)
    allowed = (
        ("sketch", "sketches") if sketch else ("page" if stream.bits == FULL else "quantized",)
    )
    form = reader.word("form", ("tokens", *allowed))
    part = reader.part("page")
    if isinstance(method, Windowed) or form == "tokens":
        stream.page = _PAGES[form].from_state(part, kind)
    else:
        stream.page = _PAGES[form].from_state(part, kind, method)
    page = stream.page
    stream.compressed = not isinstance(page, Tokens)
    if reader.has("budget"):
        stream.budget = HeadBudgets.from_state(reader.part("budget"), kind.batch, kind.heads)
    if stream.compressed and stream.budget is None:
        raise reader.wrong("form", form, "tokens, while there is no budget")
    held = 1 if sketch else int(page.held.max())
    if held > seen or (isinstance(page, Tokens) and page.slots.count != seen):
        raise reader.wrong("seen", seen, "the number of tokens that are held")
    stream.seen = seen
    stream._bytes = reader.whole("bytes")
    stream._limit = left = reader.whole("left", -(1 << 31))
    if not isinstance(page, Tokens):
        # what is allocated at the next token follows from it
        longest = 4 * page.count + 4096 + 4 * (stream.pace.given or 0)
        if left > longest:
            raise reader.wrong("left", left, f"at most {longest}")
        assert stream.budget is not None
        slots = int(torch.as_tensor(stream.budget.slots(seen)).max())
        if form != "quantized" and slots > 4 * page.count + 4096:
            raise reader.wrong("budget", slots, f"about the {page.count} slots that are held")
        stream._limit += page.appended
    if reader.has("queries"):
        stream.queries.restore(reader.part("queries"), kind)
    stream.errors.restore(reader.part("errors"), kind, seen)
    if isinstance(method, Windowed):
        method.compressor.restore(reader.part("method"), kind.batch, kind.heads)
    reader.close()
