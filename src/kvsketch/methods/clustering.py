"""How the merging methods group slots: the closest first, or k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.closest import group_closest
from kvsketch.methods.groups import Groups
from kvsketch.methods.kmeans import group_keys
from kvsketch.slots import Slots


def check_pairs(pairs: float) -> float:
    """``pairs`` if it is a share that ``group_closest`` can take, or 0.

    Raises:
        InputError: it is not in [0, 1/2].
    """
    if not 0 <= pairs <= 0.5:
        raise InputError(f"pairs={pairs!r} must lie in [0, 0.5]")
    return pairs


def group(
    slots: Slots,
    weight: Tensor,
    price: Tensor,
    count: int | Tensor,
    steps: int,
    share: float,
    chosen: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Groups:
    """``group_closest`` with weights ``price``, or ``group_keys`` with weights ``weight``: where
    that finds too few, row by row, and everywhere if ``share`` is 0. Arguments as theirs."""
    rows = torch.arange(len(weight), device=weight.device)
    closest = None
    if share:
        closest, found = group_closest(slots, price, count, share, chosen, sizes)
        if bool(found.all()):
            return closest
        rows = rows[~found]
    keys = slots.keys.flatten(0, 1)[rows].to(weight.dtype)
    if chosen is not None:
        index = chosen[rows].unsqueeze(-1).expand(-1, -1, keys.shape[2])
        keys = keys.gather(1, index)
    few = count[rows] if isinstance(count, Tensor) else count
    own = None if sizes is None else sizes[rows]
    others = group_keys(keys, weight[rows], few, steps, own)
    if closest is None:
        return others
    return Groups(closest.index.index_copy(0, rows, others.index), closest.count)
