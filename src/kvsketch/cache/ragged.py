"""Heads of different size: from one padded tensor to one flat one, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..slots import Slots


@dataclass(frozen=True)
class Ragged:
    """Where the slots of every row and KV head lie in a flat tensor ``[batch, total, ...]``.

    Attributes:
        start: int64 ``[batch, heads]``, the first slot of each.
        sizes: int64 ``[batch, heads]``, how many there are.
        total: length of a row of the flat tensor, the same for all rows.
    """

    start: Tensor
    sizes: Tensor
    total: int

    @staticmethod
    def of(sizes: Tensor, room: int = 0, multiple: int = 1) -> Ragged:
        """Heads one behind the other, with room behind each, all of them starting at a multiple.

        Args:
            sizes: int64 ``[batch, heads]``.
            room: slots that may be appended to every head.
            multiple: what starts (and the total) are multiples of.
        """
        capacity = (sizes + (room + multiple - 1)) // multiple * multiple
        ends = capacity.cumsum(-1)
        return Ragged(ends - capacity, sizes, int(ends[:, -1].max()))

    def behind(self, sizes: Tensor) -> Tensor:
        """Where each head's next slot goes once it has ``sizes`` (int64 ``[batch, heads]``) slots:
        index into the flattened flat tensor, ``[batch * heads]``."""
        row = torch.arange(self.start.shape[0], device=self.start.device).unsqueeze(1)
        return (row * self.total + self.start + sizes.to(self.start.device)).flatten()

    def places(self, count: int, last: bool = False) -> tuple[Tensor, Tensor]:
        """Where slot j < size of row b and head h lies, in the order of the slots: indices into the
        flattened padded tensor ``[batch * heads * count]``, of whose columns a head has the first
        ones (``last``: the last ones), and into the flattened flat one ``[batch * total]``."""
        batch = self.sizes.shape[0]
        device = self.sizes.device
        number = torch.arange(count, device=device)
        if last:
            number = number - count + self.sizes.unsqueeze(-1)
        there = (number >= 0) & (number < self.sizes.unsqueeze(-1))
        row = torch.arange(batch, device=device).view(batch, 1, 1) * self.total
        flat = (row + self.start.unsqueeze(-1) + number)[there]
        return there.flatten().nonzero().squeeze(-1), flat


def flatten(tensor: Tensor, padded: Tensor, flat: Tensor, total: int) -> Tensor:
    """``[batch, heads, count, ...]`` as ``[batch, total, ...]``; zeros where there is no slot."""
    batch, heads, count = tensor.shape[:3]
    out = tensor.new_zeros(batch * total, *tensor.shape[3:])
    rows = tensor.reshape(batch * heads * count, *tensor.shape[3:])
    out.index_copy_(0, flat, rows.index_select(0, padded))
    return out.view(batch, total, *tensor.shape[3:])


def unflatten(tensor: Tensor, padded: Tensor, flat: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """``[batch, total, ...]`` as ``[batch, heads, count, ...]``; zeros behind a head's slots."""
    rest = tensor.shape[2:]
    out = tensor.new_zeros(shape[0] * shape[1] * shape[2], *rest)
    out.index_copy_(0, padded, tensor.reshape(-1, *rest).index_select(0, flat))
    return out.view(*shape, *rest)


def to_the_end(slots: Slots, sizes: Tensor) -> Slots:
    """Slots whose heads have their own first as slots whose heads have their own last, with dead
    ones before: the newest tokens of all heads are then side by side."""
    behind = slots.count - sizes.to(slots.keys.device).unsqueeze(-1)
    index = torch.arange(slots.count, device=behind.device) - behind
    moved, there = slots.take(index.clamp(min=0)), index >= 0
    score = None if moved.score is None else moved.score * there
    return replace(moved.only(there), score=score)
