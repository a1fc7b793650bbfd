"""A batch in rounds: chunks of prompts are split exactly where a page is full (``Rhythm``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsketch.page.rows import Rows
from kvsketch.page.schedule import Numbers, Rhythm


@dataclass(frozen=True)
class Writes:
    """Where N new tokens are written, int64 ``[N]``.

    Attributes:
        tokens: their rows in the batch; None: all rows, in order.
        pages, slots: where their keys and values are written.
        queried: which of the N have a query that is kept; None: none. places: where it is written.
    """

    tokens: Tensor | None
    pages: Tensor
    slots: Tensor
    queried: Tensor | None
    places: Tensor


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
        which: of the requests of the round, int64.
        times: how often they were compressed before, int64.
    """

    between: int
    which: Tensor
    times: Tensor


@dataclass(frozen=True)
class Round:
    """Tokens that attend to the slots of their pages and to each other before any compression: at
    most C for each of A requests.

    Attributes:
        rows: the pages. Of their windows, the slots before the round are read and, in rounds of one
            token each, which are written first, the token's own.
        tokens: rows of the batch's queries, int64 ``[A, C]``, padded with any rows.
        own: bool ``[A, C]``, False where padded; None: nothing is padded.
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
) -> list[Round]:
    """The rounds of a batch, in order. Requests with one token and those with more are in rounds of
    their own.

    Args:
        starts: where each request's queries start in the batch, and the end, ``[R + 1]``.
        seen: tokens of each request before these, ``[R]``; pages: ``[R]``.
        queries: how many of the last queries before a compression are kept.
        copies: of pages; None: none is copied.
        middle: slots of the largest head in the middle of a page.
    """
    copies = copies or Copies.none(len(seen))
    start = copies.start.copy()
    found = []
    at, left, seen = starts[:-1].copy(), np.diff(starts), seen.copy()

    def tensor(values: Any) -> Tensor:
        found = torch.from_numpy(values)  # faster than as_tensor, once per token and part
        return found if device.type == "cpu" else found.to(device)

    while (left > 0).any():
        until = rhythm.left(seen)
        count = np.minimum(left, until)
        count = np.where(copies.at > seen, np.minimum(count, copies.at - seen), count)
        for some in (count == 1, count > 1):
            rows = some.nonzero()[0]
            if not len(rows):
                continue
            rows = rows[pages[rows].argsort()]
            number, mine = np.arange(count[rows].max()), count[rows, None]
            own = number < mine
            held = rhythm.held(seen[rows])[:, None] + number
            place = number + queries - until[rows, None]
            page = np.broadcast_to(pages[rows, None], own.shape)
            token = at[rows, None] + np.minimum(number, mine - 1)
            queried = (place[own] >= 0).nonzero()[0]
            every = np.array_equal(token[own], np.arange(starts[-1]))
            writes = Writes(
                None if every else tensor(token[own]),
                tensor(page[own]),
                tensor(held[own]),
                tensor(queried) if len(queried) else None,
                tensor(place[own][queried]),
            )
            reads = held[:, 0] + (held.shape[1] == 1)
            full, before = (count == until)[rows], seen[rows] >= rhythm.slots
            times = rhythm.times(seen[rows])
            fills = np.minimum(times * rhythm.every, middle)
            begun = start[rows] >= 0
            kept = (seen + count == copies.at)[rows] & (count[rows] > 0)
            found.append(
                Round(
                    Rows(
                        tensor(pages[rows]),
                        _runs(pages[rows].tolist()),
                        tensor(reads),
                        int(reads.max()),
                    ),
                    tensor(token),
                    None if own.all() else tensor(own),
                    writes,
                    bool(before.any()),
                    tensor((seen[rows] == 0).nonzero()[0]),
                    [
                        Full(int(n), tensor(where), tensor(times[where]))
                        for n in np.unique(fills[full])
                        for (where,) in [(full & (fills == n)).nonzero()]
                    ],
                    tensor(np.stack([start[rows], pages[rows]])[:, begun]) if begun.any() else None,
                    tensor(np.stack([pages, copies.keep])[:, rows[kept]]) if kept.any() else None,
                )
            )
            start[rows] = -1
        at, left, seen = at + count, left - count, seen + count
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
