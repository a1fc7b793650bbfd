"""Which rows of pages in an engine's memory a batch reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The pages of A requests, and how much of each page's window is read.

    Attributes:
        pages: int64 ``[A]``, ascending; runs: the same pages as consecutive slices.
        reads: how many slots of the window each request reads, int64 ``[A]``.
        most: the largest of them.
    """

    pages: Tensor
    runs: list[slice]
    reads: Tensor
    most: int
