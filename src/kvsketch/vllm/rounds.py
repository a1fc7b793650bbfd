"""When a request's page is compressed: a function of the number of tokens seen, and nothing else.

Prompts come in chunks of any size, requests are preempted and read again, and several run in one
batch. An answer depends on none of this, because chunks are split exactly where a page is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rhythm:
    """A page of ``slots`` slots per KV head is full, and is compressed to ``slots - buffer``, at
    token number ``slots`` and every ``buffer`` tokens after it. A page in two parts has ``middle``
    more slots, on average over KV heads, for what is compressed."""

    slots: int
    buffer: int
    middle: int = 0

    def held(self, seen: Numbers) -> Numbers:
        """Slots in use after ``seen`` tokens."""
        kept = self.slots - self.buffer
        return np.where(seen < self.slots, seen, kept + (seen - self.slots) % self.buffer)

    def all_held(self, seen: Numbers) -> Numbers:
        """As ``held``, plus the slots of the middle."""
        held = self.held(seen)
        found: Numbers = held + np.minimum(seen - held, self.middle)
        return found

    def left(self, seen: Numbers) -> Numbers:
        """Tokens that are left until the next compression."""
        later = self.buffer - (seen - self.slots) % self.buffer
        return np.where(seen < self.slots, self.slots - seen, later)


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
class Round:
    """Tokens that attend to the slots of their pages and to each other before any compression: at
    most C for each of A requests.

    Attributes:
        pages: int64 ``[A]``, ascending; runs: the same pages as consecutive slices.
        tokens: rows of the batch's queries, int64 ``[A, C]``, padded with any rows.
        own: bool ``[A, C]``, False where padded; None: nothing is padded.
        reads: how many slots of its page each request reads, int64 ``[A]``: those before the round
            and, in rounds of one token each, which are written first, the token's own.
        most: the largest of them.
        writes: where the new tokens are written.
        compressed: whether any page was compressed before.
        fresh: which of the A requests start with this round, int64.
        first: which pages are full after the round for the first time; again: which are full but
            were compressed before; int64.
        times: how often each page of ``again`` was compressed before, int64.
        before: pages to copy before the round, sources and targets, int64 ``[2, n]``, or None.
            after: likewise, after the round.
    """

    pages: Tensor
    runs: list[slice]
    tokens: Tensor
    own: Tensor | None
    reads: Tensor
    most: int
    writes: Writes
    compressed: bool
    fresh: Tensor
    first: Tensor
    again: Tensor
    times: Tensor
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
) -> list[Round]:
    """The rounds of a batch, in order. Requests with one token and those with more are in rounds of
    their own.

    Args:
        starts: where each request's queries start in the batch, and the end, ``[R + 1]``.
        seen: tokens of each request before these, ``[R]``; pages: ``[R]``.
        queries: how many of the last queries before a compression are kept.
        copies: of pages; None: none is copied.
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
            times = (seen + count - rhythm.slots)[rows] // rhythm.buffer
            begun = start[rows] >= 0
            kept = (seen + count == copies.at)[rows] & (count[rows] > 0)
            found.append(
                Round(
                    tensor(pages[rows]),
                    _runs(pages[rows].tolist()),
                    tensor(token),
                    None if own.all() else tensor(own),
                    tensor(reads),
                    int(reads.max()),
                    writes,
                    bool(before.any()),
                    tensor((seen[rows] == 0).nonzero()[0]),
                    tensor((full & ~before).nonzero()[0]),
                    tensor((full & before).nonzero()[0]),
                    tensor(times[full & before]),
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
