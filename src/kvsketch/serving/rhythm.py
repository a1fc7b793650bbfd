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
class Round:
    """Tokens that attend to what is there, and to themselves, before anything is compressed: for
    each of A requests at most C.

    Attributes:
        pages: int64 ``[A]``.
        tokens: which rows of the batch's queries, int64 ``[A, C]``; behind a request's own any.
        own: bool ``[A, C]``, whether they are its own; None: all are.
        held: slots before them, int64 ``[A]``; most: the largest.
        until: tokens until the next compression, from the first of them on, int64 ``[A]``.
        fresh: which of the A begin; due: which are full afterwards; int64.
    """

    pages: Tensor
    tokens: Tensor
    own: Tensor | None
    held: Tensor
    most: int
    until: Tensor
    fresh: Tensor
    due: Tensor


def rounds(
    starts: Numbers, seen: Numbers, pages: Numbers, rhythm: Rhythm, device: torch.device
) -> list[Round]:
    """What a batch of requests does, in order; those with one token apart from those with more.

    Args:
        starts: where each request's queries start in the batch, and the end, ``[R + 1]``.
        seen: tokens of each before these, ``[R]``; pages: ``[R]``.
    """
    found = []
    at, left, seen = starts[:-1].copy(), np.diff(starts), seen.copy()
    while (left > 0).any():
        until = rhythm.left(seen)
        count = np.minimum(left, until)
        for some in (count == 1, count > 1):
            rows = some.nonzero()[0]
            if not len(rows):
                continue
            most = int(count[rows].max())
            own = np.arange(most) < count[rows, None]
            held = rhythm.held(seen[rows])

            def tensor(values: Any) -> Tensor:
                return torch.as_tensor(values, device=device)

            found.append(
                Round(
                    tensor(pages[rows]),
                    tensor(at[rows, None] + np.minimum(np.arange(most), count[rows, None] - 1)),
                    None if own.all() else tensor(own),
                    tensor(held),
                    int(held.max()),
                    tensor(until[rows]),
                    tensor((seen[rows] == 0).nonzero()[0]),
                    tensor((count == until)[rows].nonzero()[0]),
                )
            )
        at, left, seen = at + count, left - count, seen + count
    return found
