"""How the merging methods group slots: the closest first, or k-means."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from .closest import group_closest
from .groups import Groups
from .kmeans import group_keys


def check_pairs(pairs: float) -> float:
    """``pairs`` if it is a share that ``group_closest`` can take, or 0.

    Raises:
        InputError: it is not in [0, 1/2].
    """
    if not 0 <= pairs <= 0.5:
        raise InputError(f"pairs={pairs!r} must lie in [0, 0.5]")
    return pairs


def group(
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    price: Tensor,
    count: int,
    steps: int,
    share: float,
) -> Groups:
    """``group_closest`` with weights ``price``, or ``group_keys`` with weights ``weight``: where
    that finds too few, row by row, and everywhere if ``share`` is 0. Arguments as theirs."""
    if not share:
        return group_keys(keys, weight, count, steps)
    closest, found = group_closest(keys, values, price, count, share)
    if bool(found.all()):
        return closest
    rows = (~found).nonzero().squeeze(1)
    others = group_keys(keys[rows], weight[rows], count, steps)
    return Groups(closest.index.index_copy(0, rows, others.index), count)
