"""The least of every row of a table, faster than torch finds it."""

from __future__ import annotations

from torch import Tensor

#: What ``least`` takes the columns of a table by.
WIDTH = 32


def least(table: Tensor) -> tuple[Tensor, Tensor]:
    """The least of every row of ``[R, n, m]``, m a multiple of ``WIDTH``, and its column: in two
    levels, since torch's argmin takes ten times as long as its amin."""
    # Column j is (j // WIDTH, j % WIDTH): the least over the former, then over the latter.
    folded = table.view(*table.shape[:2], -1, WIDTH)
    low, column = folded.amin(2).min(-1)
    at = column[..., None, None].expand(-1, -1, folded.shape[2], 1)
    return low, folded.gather(3, at).squeeze(3).argmin(-1) * WIDTH + column
