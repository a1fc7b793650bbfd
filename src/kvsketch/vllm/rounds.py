"""A batch in rounds: chunks of prompts are split exactly where a page is compressed.

A page is compressed when it is full (``Rhythm``). With ``scheduler.PageScheduler``, whose chunks
end at multiples of a number of tokens or with the prompt, these pieces of a prompt may be larger
than the page: they attend to it and to themselves and are compressed together with it, so that a
prompt takes few compressions. Both depend on the request alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsketch.page.rows import Rows
from kvsketch.page.schedule import Numbers, Rhythm
from kvsketch.vllm.states import States

# So many tokens of a request, such as guesses that are verified together, are read one by one: the
# kernels read decoded tokens fastest.
_FEW = 8


@dataclass(frozen=True)
class Queried:
    """Which queries are kept for the next compression, int64 ``[n]`` each: rows of the batch, and
    the pages and places to which they are written."""

    tokens: Tensor
    pages: Tensor
    places: Tensor


@dataclass(frozen=True)
class Writes:
    """Where N new tokens are written, int64 ``[N]``.

    Attributes:
        tokens: their rows in the batch; None: all rows, in order.
        pages, slots: where their keys and values are written.
        queried: the queries that are kept; None: none.
    """

    tokens: Tensor | None
    pages: Tensor
    slots: Tensor
    queried: Queried | None


@dataclass(frozen=True)
class Copies:
    """Pages of prefixes: which ones requests start from, and where their own are copied to.

    Attributes:
        start: for each of R requests, the page that holds the tokens it has seen, or -1; int64
            ``[R]``.
        keep: the page that its own is copied to after ``at`` tokens.
        at: number of tokens; 0: it is not copied.
    """

    start: Numbers
    keep: Numbers
    at: Numbers

    @staticmethod
    def none(requests: int) -> Copies:
        """No copies."""
        zeros = np.zeros(requests, dtype=np.int64)
        return Copies(zeros - 1, zeros, zeros)


@dataclass(frozen=True)
class Full:
    """Pages that are full after a round.

    Attributes:
        between: slots of each head in the middle, or as many as it has room for.
        window: slots of each head in the window.
        tokens: rows of the batch that are compressed with them and are not written before, int64
            ``[requests, n]``; None: the window holds all tokens.
        which: of the requests of the round, int64.
        seen: the tokens that each has seen then, int64.
        over: nothing else in the batch reads or copies them.
    """

    between: int
    window: int
    tokens: Tensor | None
    which: Tensor
    seen: Tensor
    over: bool


@dataclass(frozen=True)
class Round:
    """Tokens that attend to the slots of their pages and to each other before any compression: at
    most C for each of A requests.

    Attributes:
        rows: the pages. Of their windows, the slots before the round are read and, in rounds of one
            token each, which are written first, the token's own.
        tokens: rows of the batch's queries, int64 ``[A, C]``, padded with any rows.
        own: bool ``[A, C]``, False where padded; None: nothing is padded.
        answered: the rows without padding, in order; None: all of the batch.
        writes: where the new tokens are written.
        compressed: whether any page was compressed before.
        fresh: which of the A requests start with this round, int64.
        full: the pages that are full after the round, by what is in their middle.
        before: pages to copy before the round, sources and targets, int64 ``[2, n]``, or None.
            after: likewise, after the round.
    """

    rows: Rows
    tokens: Tensor
    own: Tensor | None
    answered: Tensor | None
    writes: Writes
    compressed: bool
    fresh: Tensor
    full: list[Full]
    before: Tensor | None
    after: Tensor | None


def rounds(
    starts: Numbers,
    seen: Numbers,
    pages: Numbers,
    rhythm: Rhythm,
    queries: int,
    device: torch.device,
    copies: Copies | None = None,
    middle: int = 0,
    states: States | None = None,
    pieces: Numbers | None = None,
    new: Numbers | None = None,
    guessed: bool = False,
) -> list[Round]:
    """The rounds of a batch, in order. Requests with few tokens, each of which is then a row of its
    own, and those with more are in rounds of their own.

    Args:
        starts: where each request's queries start in the batch, and the end, ``[R + 1]``.
        seen: tokens of each request before these, ``[R]``; pages: ``[R]``.
        queries: how many of the last queries before a compression are kept.
        copies: of pages; None: none is copied.
        middle: slots of the largest head in the middle of a page.
        states: of the requests' pages, ``[R]``, changed to those after the batch; those of copies
            go to ``states.copied``. None: pages that were compressed wherever they were full.
        pieces: the number of tokens at whose multiples each request's prompt is compressed,
            ``[R]``; 0: it is compressed where its page is full. None: all are 0.
        new: tokens of each request, ``[R]``; the rows that follow them are left out. None: all.
        guessed: the tokens, one of each request, may be rejected. They are written behind the
            others, or over the last one if a page is full, and nothing is compressed.
    """
    copies = copies or Copies.none(len(seen))
    states = states or States.regular(rhythm, seen)
    pieces = np.zeros_like(seen) if pieces is None else pieces
    start = copies.start.copy()
    found = []
    left = np.diff(starts) if new is None else new.copy()
    at, seen = starts[:-1].copy(), seen.copy()

    def tensor(values: Any) -> Tensor:
        found = torch.from_numpy(values)  # faster than as_tensor, once per token and part
        return found if device.type == "cpu" else found.to(device)

    while (left > 0).any():
        held = np.minimum(states.held(rhythm, seen), rhythm.slots - 1)
        room, whole = rhythm.slots - held, pieces > 0
        until = np.where(whole, pieces - seen % np.maximum(pieces, 1), room)
        count = np.minimum(left, until)
        count = np.where(copies.at > seen, np.minimum(count, copies.at - seen), count)
        # A piece of a prompt is scored and stored at its end, and compressed if it has no room. A
        # single token is written first: after it the page is full at most.
        beyond = whole & (count > 1)
        due = (held + count > rhythm.first) & beyond | (held + count == rhythm.slots) & (count > 0)
        due &= not guessed
        few = (count > 0) & (count <= _FEW) & ~beyond
        for some in (few, (count > 0) & ~few):
            rows = some.nonzero()[0]
            if not len(rows):
                continue
            rows = rows[pages[rows].argsort()]
            single, end = some is few, np.arange(len(rows))
            each, number = rows, np.arange(count[rows].max())[None]
            if single:  # every token is a row of its own, and reads those of its page before it
                each, end = np.repeat(rows, count[rows]), count[rows].cumsum() - 1
                number = np.arange(len(each)) - np.repeat(end + 1 - count[rows], count[rows])
                number = number[:, None]
            own, mine = number < count[each, None], count[each, None]
            slot = held[each, None] + number
            place = number + queries - room[each, None]
            page = np.broadcast_to(pages[each, None], own.shape)
            token = at[each, None] + np.minimum(number, mine - 1)
            written = own & ~beyond[each, None]
            queried = written & (place >= 0)
            every = np.array_equal(token[own], np.arange(starts[-1]))
            answered = None if every else tensor(token[own])
            writes = Writes(
                answered if not beyond[rows].any() else tensor(token[written]),
                tensor(page[written]),
                tensor(slot[written]),
                Queried(tensor(token[queried]), tensor(page[queried]), tensor(place[queried]))
                if queried.any()
                else None,
            )
            reads = slot[:, 0] + 1 if single else held[rows]
            begun = start[rows] >= 0
            kept = (seen + count == copies.at)[rows] & (count[rows] > 0)
            compressed = states.last[rows] > 0
            fills = np.where(due, states.filled(rhythm, middle), 0)
            first = (seen[each, None] + number)[:, 0] == 0
            found.append(
                Round(
                    Rows(
                        tensor(pages[each]),
                        _runs(pages[each].tolist()),
                        tensor(reads),
                        int(reads.max()),
                    ),
                    tensor(token),
                    None if own.all() else tensor(own),
                    answered,
                    writes,
                    bool(compressed.any()),
                    tensor(first.nonzero()[0]),
                    [
                        Full(
                            int(between),
                            int(window),
                            tensor(token[where, :more]) if more else None,
                            tensor(end[where]),
                            tensor((seen + count)[rows[where]]),
                            bool(over),
                        )
                        for between, window, more, over, where in _alike(
                            np.stack(
                                [
                                    fills[rows],
                                    np.where(beyond, held, rhythm.slots)[rows],
                                    np.where(beyond, count, 0)[rows],
                                    (left == count)[rows] & ~kept & (new is None),
                                ]
                            ),
                            (due | beyond)[rows],
                        )
                    ],
                    tensor(np.stack([start[rows], pages[rows]])[:, begun]) if begun.any() else None,
                    tensor(np.stack([pages, copies.keep])[:, rows[kept]]) if kept.any() else None,
                )
            )
            start[rows] = -1
        at, left, seen = at + count, left - count, seen + count
        states.compress(due, seen)
        states.copy(seen == copies.at)
    return found


def _alike(columns: Numbers, some: Numbers) -> list[tuple[int, int, int, int, Numbers]]:
    """Which of the columns ``[4, n]`` that are ``some`` (bool ``[n]``) are equal, and to what."""
    if not some.any():
        return []
    found = []
    for kind in np.unique(columns[:, some], axis=1).T:
        same = (kind == columns.T).all(1) & some
        found.append((*kind.tolist(), same.nonzero()[0]))
    return found


def _runs(pages: list[int]) -> list[slice]:
    """Ascending numbers as slices, each as long as the steps between them stay the same. Equal
    numbers, as of the requests that vLLM makes up to warm up, are slices of their own."""
    found: list[slice] = []
    start, end = 0, len(pages)
    while start < end:
        stop, step = start + 1, 1
        if stop < end and pages[stop] > pages[start]:
            step = pages[stop] - pages[start]
            while stop < end and pages[stop] - pages[stop - 1] == step:
                stop += 1
        found.append(slice(pages[start], pages[stop - 1] + 1, step))
        start = stop
    return found
