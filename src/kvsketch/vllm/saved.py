"""What an engine reads of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.page.kind import Kind
from kvsketch.page.page import Page
from kvsketch.slots import Slots
from kvsketch.state import FLOATS, Reader, State


@dataclass(frozen=True)
class Saved:
    """What an engine that has memory of its own for pages needs of a cache of one row.

    Attributes:
        seen: the number of tokens.
        compressed: whether any token was ever compressed.
        pages: of every layer with full attention; the tokens since its last compression are those
            ``appended``.
        queries: likewise, those that wait for the next compression, ``[1, num_attention_heads, n,
            head_dim]``; None: none do.
        windows: by the number of a layer with a sliding window, its last tokens.
    """

    seen: int
    compressed: bool
    pages: Sequence[Page]
    queries: Sequence[Tensor | None]
    windows: Mapping[int, Slots] = field(default_factory=dict)


def saved_of(state: State, layers: int) -> Saved:
    """What an engine needs of a file, on the CPU and without a model.

    Args:
        state: as ``files.format.read`` returns it.
        layers: of the model.

    Raises:
        InputError: a state that is not valid.
        UnsupportedError: several rows, padding, a streaming sketch, or layers without slots.
    """
    counts, pages, queries = set(), [], list[Tensor | None]()
    windows, ends = dict[int, Slots](), set[int]()
    for number, part in enumerate(Reader(state).parts("layers", layers)):
        if part.has("keys"):
            ends.add(part.whole("seen", 1, 1 << 31))
            windows[number] = _window(part)
            continue
        if not (part.has("kind") and part.has("stream")) or part.has("linear"):
            raise UnsupportedError("the file has layers with other states than slots")
        kind, stream = Kind.read(part.part("kind")), part.part("stream")
        if kind.batch != 1 or stream.flag("padded"):
            raise UnsupportedError(f"the file has {kind.batch} rows or padding; one text is needed")
        if stream.word("form") != "page":
            raise UnsupportedError("the file holds a streaming sketch, whose slots change")
        if stream.has("pins") and len(stream.anything("pins")) > 1:
            raise UnsupportedError("the file has pinned tokens, which an engine's pages have not")
        counts.add((stream.whole("seen", 1, 1 << 31), stream.flag("compressed")))
        pages.append(Page.from_state(stream.part("page"), kind))
        wait, shape = stream.has("queries"), (1, None, None, None)
        own = stream.part("queries").tensor("queries", shape, *FLOATS.values()) if wait else None
        queries.append(own)
    ((seen, compressed),) = counts if len(counts) == 1 else ((0, False),)
    if not seen or not ends <= {seen} or max(int(page.held.max()) for page in pages) > seen:
        raise InputError("the layers of the file hold different numbers of tokens")
    return Saved(seen, compressed, pages, queries, windows)


def _window(part: Reader) -> Slots:
    """The tokens in a sliding window, without the layer, which says what shape they must have."""
    keys = part.tensor("keys", (1, None, None, None), *FLOATS.values())
    return Slots(keys, part.tensor("values", (1, *keys.shape[1:3], None), keys.dtype))
