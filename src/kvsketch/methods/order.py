"""Sorting rows of numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def order(numbers: Tensor, descending: bool = False) -> Tensor:
    """The places of the numbers of each row in order, those of equal ones ascending, as by torch's
    stable ``argsort`` along the last axis. On a CPU it takes a fraction of the time: number and
    place are sorted as one integer, for which numpy has vector instructions.

    Args:
        numbers: ``[..., n]``, float32 without NaN, or int64 of at most 31 bits; of other floats and
            on a GPU, torch sorts.

    Returns:
        int64 ``[..., n]``.
    """
    if numbers.device.type != "cpu" or numbers.dtype not in (torch.float32, torch.int64):
        return numbers.argsort(dim=-1, descending=descending, stable=True)
    keys = -numbers if descending else numbers
    if keys.dtype == torch.float32:
        keys = (keys + 0.0).view(torch.int32).long()  # -0 becomes 0
        keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)  # of two negative floats
    keys = (keys << 32) | torch.arange(numbers.shape[-1], device="cpu")
    return torch.from_numpy(np.sort(keys.detach().numpy(), axis=-1)) & 0xFFFFFFFF
