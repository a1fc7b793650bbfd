"""Numbers beside every slot while a method compresses: further columns of the keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.slots import Slots, compute_dtype


def with_columns(slots: Slots, *columns: Tensor) -> Slots:
    """``slots`` with numbers beside each (float, broadcastable to ``[batch, heads, n]``), which go
    wherever the slot goes: the last columns of the keys, which are float32 then, or float64."""
    keys = slots.keys.to(compute_dtype(slots.keys.dtype))
    beside = [column.to(keys.dtype).expand(keys.shape[:3]).unsqueeze(-1) for column in columns]
    return replace(slots, keys=torch.cat([keys, *beside], dim=-1))


def column_of(slots: Slots, number: int) -> Tensor:
    """One of the numbers, ``[batch, heads, n]``; ``number``: -1 for the last column."""
    return slots.keys[..., number]


def without_columns(slots: Slots, count: int, dtype: torch.dtype) -> Slots:
    """``slots`` without their last ``count`` columns, and with keys bit for bit as before."""
    return replace(slots, keys=slots.keys[..., :-count].to(dtype))
