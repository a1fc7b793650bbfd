"""A fixed-capacity page of slots: appended to in place, read as views."""

from __future__ import annotations

import torch
from torch import Tensor

from ..slots import FIELDS, Slots


class Page:
    """Buffers for ``capacity`` slots per KV head, of which the first ``count`` are in use.

    Args:
        slots: the first content; decides dtype, device and which fields exist.
        capacity: slots per KV head, at least ``slots.count``. Equal means no copy is made.
    """

    def __init__(self, slots: Slots, capacity: int) -> None:
        self.count = slots.count
        self.capacity = capacity
        if capacity == slots.count:
            # clone only views: a view would keep the larger tensor it was cut from alive
            self._buffers = {name: _owned(tensor) for name, tensor in slots.tensors().items()}
        else:
            self._buffers = {
                name: _padded(tensor, capacity) for name, tensor in slots.tensors().items()
            }
        self._view: Slots | None = None

    @property
    def room(self) -> int:
        return self.capacity - self.count

    @property
    def slots(self) -> Slots:
        """The slots in use, as views."""
        if self._view is None:
            self._view = Slots(
                **{name: b.narrow(2, 0, self.count) for name, b in self._buffers.items()}
            )
        return self._view

    def append(self, new: Slots) -> None:
        """Write ``new`` behind the slots in use; it must fit into ``room``."""
        start, length = self.count, new.count
        incoming = new.tensors()
        if "mass" in incoming and "mass" not in self._buffers:
            ones = torch.ones_like(self._buffers["keys"][..., 0], dtype=incoming["mass"].dtype)
            self._buffers["mass"] = ones
        for name in FIELDS:
            if name in self._buffers:
                tensor = incoming.get(name)
                target = self._buffers[name].narrow(2, start, length)
                if tensor is None:  # mass of exact tokens is 1, a new token has no score yet
                    target.fill_(1.0 if name == "mass" else 0.0)
                else:
                    target.copy_(tensor)
        self.count = start + length
        self._view = None

    def rewrite_last(self, new: Slots) -> None:
        """Overwrite the last ``new.count`` slots in use."""
        self.count -= new.count
        self.append(new)

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots in use, ``[batch, heads, count]``."""
        if "score" not in self._buffers:
            self._buffers["score"] = score.new_zeros(*score.shape[:2], self.capacity)
        self._buffers["score"][:, :, : self.count] = score
        self._view = None

    def tensors(self) -> list[Tensor]:
        return list(self._buffers.values())


def _owned(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()


def _padded(tensor: Tensor, capacity: int) -> Tensor:
    shape = (*tensor.shape[:2], capacity, *tensor.shape[3:])
    buffer = tensor.new_empty(shape)
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer
