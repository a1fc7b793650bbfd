"""When a request's page is compressed: a function of the tokens it has seen, and of nothing else.

Prompts come in chunks of any size, requests are preempted and read again, several run in one batch:
an answer depends on none of this, because chunks are cut where a page is full and nowhere else.
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
    token number ``slots`` and every ``buffer`` tokens after it."""

    slots: int
    buffer: int

    def held(self, seen: Numbers) -> Numbers:
        """Slots held after so many tokens."""
        kept = self.slots - self.buffer
        return np.where(seen < self.slots, seen, kept + (seen - self.slots) % self.buffer)

    def left(self, seen: Numbers) -> Numbers:
        """Tokens until the next compression."""
        later = self.buffer - (seen - self.slots) % self.buffer
        return np.where(seen < self.slots, self.slots - seen, later)


@dataclass(frozen=True)
class Writes:
    """Where N new tokens go, int64 ``[N]``.

    Attributes:
        tokens: rows of the batch; None: all of them, in order.
        pages, slots: where their keys and values go.
        queried: which of the N have a query that is kept; None: no one. places: where it goes.
    """

    tokens: Tensor | None
    pages: Tensor
    slots: Tensor
    queried: Tensor | None
    places: Tensor


@dataclass(frozen=True)
class Round:
    """Tokens that attend to what is there, and to themselves, before anything is compressed: for
    each of A requests at most C.

    Attributes:
        pages: int64 ``[A]``; span: the first of them, and one behind the last.
        tokens: which rows of the batch's queries, int64 ``[A, C]``; behind a request's own any.
        own: bool ``[A, C]``, whether they are its own; None: all are.
        most: slots before them, of the request that has most.
        writes: where the new tokens go.
        fresh: which of the A begin; due: which are full afterwards; int64.
    """

    pages: Tensor
    span: tuple[int, int]
    tokens: Tensor
    own: Tensor | None
    most: int
    writes: Writes
    fresh: Tensor
    due: Tensor


def rounds(
    starts: Numbers,
    seen: Numbers,
    pages: Numbers,
    rhythm: Rhythm,
    queries: int,
    device: torch.device,
) -> list[Round]:
    """What a batch of requests does, in order; those with one token apart from those with more.

    Args:
        starts: where each request's queries start in the batch, and the end, ``[R + 1]``.
        seen: tokens of each before these, ``[R]``; pages: ``[R]``.
        queries: the last so many before a compression are kept.
    """
    found = []
    at, left, seen = starts[:-1].copy(), np.diff(starts), seen.copy()

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, device=device)

    while (left > 0).any():
        until = rhythm.left(seen)
        count = np.minimum(left, until)
        for some in (count == 1, count > 1):
            rows = some.nonzero()[0]
            if not len(rows):
                continue
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
            found.append(
                Round(
                    tensor(pages[rows]),
                    (int(pages[rows].min()), int(pages[rows].max()) + 1),
                    tensor(token),
                    None if own.all() else tensor(own),
                    int(held[:, 0].max()),
                    writes,
                    tensor((seen[rows] == 0).nonzero()[0]),
                    tensor((count == until)[rows].nonzero()[0]),
                )
            )
        at, left, seen = at + count, left - count, seen + count
    return found
