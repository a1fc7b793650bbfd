"""The state of a stream, without the arguments that it was made with."""

from __future__ import annotations

from typing import Any

import torch

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.stream import Stream
from kvsketch.page.kind import Kind
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits
from kvsketch.state import Reader, State

#: the kinds of pages, by their name in a state
_PAGES: dict[str, Any] = {
    "page": Page,
    "sketch": SketchPage,
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
            "bits": list(stream.pace.bits),
            "bytes": stream.scores.row_bytes,
            "compressed": stream.compressed,
            "asked_again": stream.scores.asked_again,
            "pins": stream.pins.values(),
            "rhythm": stream.pace.rhythm is not None,
            "left": stream.pace.limit - (page.appended if stream.compressed else 0),
            "form": form,
        }
    )
    state.put("page", page.to_state())
    if stream.pace.given is None and stream.pace.budget is not None:
        state.put("budget", stream.pace.budget.to_state())
    state.put("queries", stream.scores.queries.to_state())
    state.put("errors", stream.errors.to_state())
    state.put("method", stream.method.to_state() if stream.method.recompresses else None)
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
    pinned = reader.has("pins")  # not in older files
    if pinned:
        stream.pins.restore(reader)
    seen = reader.whole("seen", 1, most or 1 << 31)
    stream.padded = reader.flag("padded")
    bits = reader.anything("bits")
    if not isinstance(bits, list) or bits not in ([16, 16], [8, 8], [8, 4], [4, 8], [4, 4]):
        raise reader.wrong("bits", bits, "two of 16, 8 and 4")
    stream.pace.store(Bits(*bits), stream.seen)
    sketch = not method.recompresses
    compressed = reader.flag("compressed")
    form = reader.word("form", ("sketch",) if sketch and compressed else ("page",))
    given = (method,) if sketch and compressed else ()
    stream.page = page = _PAGES[form].from_state(reader.part("page"), kind, *given)
    plain = form == "sketch" or (
        page.exact.grows != compressed and (page.middle is None or stream.pace.bits != FULL)
    )
    if not plain:
        raise reader.wrong("compressed", compressed, "what the page is")
    if reader.has("budget"):
        stream.pace.start(HeadBudgets.from_state(reader.part("budget"), kind.batch, kind.heads))
    if not (rhythm := reader.flag("rhythm")):
        stream.pace.rhythm = None  # ended by a pin or by ``compact``, or never begun
    elif stream.pace.rhythm is None:
        raise reader.wrong("rhythm", rhythm, "false, with such a budget")
    if compressed and stream.pace.budget is None:
        raise reader.wrong("compressed", True, "false, while there is no budget")
    held = 1 if sketch else int(page.held.max())
    if held > seen or (not compressed and page.count != seen):
        raise reader.wrong("seen", seen, "the number of tokens that are held")
    stream.seen = seen
    if compressed and not pinned:
        stream.pins.tail = seen
    stream.scores.row_bytes = reader.whole("bytes")
    stream.pace.limit = left = reader.whole("left", -(1 << 31))
    if compressed:
        # what is allocated at the next token follows from it
        longest = 4 * page.count + 4096 + 4 * (stream.pace.schedule.given or 0)
        if left > longest:
            raise reader.wrong("left", left, f"at most {longest}")
        assert stream.pace.budget is not None
        slots = int(torch.as_tensor(stream.pace.budget.slots(seen), device="cpu").max())
        if stream.pace.bits == FULL and slots > 4 * page.count + 4096:
            raise reader.wrong("budget", slots, f"about the {page.count} slots that are held")
        stream.pace.limit += page.appended
    stream.begun = True
    stream.pace.resume(page)
    if reader.has("asked_again"):  # not in older files
        stream.scores.asked_again = reader.flag("asked_again")
    for name in ("read_again", "asked_whole"):  # in a few files, of no effect any more
        if reader.has(name):
            reader.flag(name)
    if reader.has("queries"):
        stream.scores.queries.restore(reader.part("queries"), kind)
    stream.errors.restore(reader.part("errors"), kind, seen)
    if stream.compressor is not None:  # a sketch is part of its page
        stream.compressor.restore(reader.part("method"), kind.batch, kind.heads)
    reader.close()
