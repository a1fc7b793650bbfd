"""Heads of different size: conversion between a padded tensor and a flat one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.errors import UnsupportedError
from kvsketch.partial import NOTHING
from kvsketch.slots import Slots
from kvsketch.state import Reader, State

# Heads of different size start at multiples of about this share of their mean size ...
_PART = 32
# ... and at most of this number of slots, the size of the blocks in which a kernel reads slots.
_MOST_BLOCK = 256
# A saved layout takes at most so many times the number of its slots.
_ROOMY = 3
# For blocks of fewer slots, the heads that they belong to are not stored.
_WORTH_KEEPING = 8


@dataclass(frozen=True)
class Ragged:
    """The places of the slots of every row and KV head in a flat tensor ``[batch, total, ...]``.

    Attributes:
        start: int64 ``[batch, heads]``, the first slot of each head.
        sizes: int64 ``[batch, heads]``, the number of slots of each head.
        total: the length of a row of the flat tensor, the same for all rows.
    """

    start: Tensor
    sizes: Tensor
    total: int

    @staticmethod
    def of(sizes: Tensor, room: int = 0, multiple: int = 1) -> Ragged:
        """A layout of one head after another, with room after each.

        Args:
            sizes: int64 ``[batch, heads]``.
            room: slots that may be appended to every head.
            multiple: the starts of all heads, and the total, are multiples of this number.
        """
        capacity = (sizes + (room + multiple - 1)) // multiple * multiple
        ends = capacity.cumsum(-1)
        return Ragged(ends - capacity, sizes, int(ends[:, -1].max()))

    def behind(self, sizes: Tensor) -> Tensor:
        """The place of each head's next slot if it has ``sizes`` (int64 ``[batch, heads]``) slots,
        as an index into the flattened flat tensor, ``[batch * heads]``."""
        row = torch.arange(self.start.shape[0], device=self.start.device).unsqueeze(1)
        return (row * self.total + self.start + sizes.to(self.start.device)).flatten()

    def places(self, count: int, last: bool = False) -> tuple[Tensor, Tensor]:
        """The places of all slots j < size of rows b and heads h, in the order of the slots, as
        indices into the flattened padded tensor ``[batch * heads * count]``, in which a head has
        the first columns (``last``: the last ones), and into the flattened flat tensor ``[batch *
        total]``."""
        batch = self.sizes.shape[0]
        device = self.sizes.device
        number = torch.arange(count, device=device)
        if last:
            number = number - count + self.sizes.unsqueeze(-1)
        there = (number >= 0) & (number < self.sizes.unsqueeze(-1))
        row = torch.arange(batch, device=device).view(batch, 1, 1) * self.total
        flat = (row + self.start.unsqueeze(-1) + number)[there]
        return there.flatten().nonzero().squeeze(-1), flat

    @property
    def flat(self) -> Tensor:
        """The second result of ``places``, for all slots, without the padded tensor."""
        sizes, device = self.sizes.flatten(), self.sizes.device
        row = torch.arange(self.start.shape[0], device=device).unsqueeze(1) * self.total
        first = (row + self.start).flatten() - (sizes.cumsum(0) - sizes)
        every = torch.arange(int(sizes.sum()), device=device)
        return every + first.repeat_interleave(sizes)

    def packed(self, tensor: Tensor) -> Tensor:
        """``[batch, total, ...]`` as ``[slots of all heads, ...]``."""
        return tensor.reshape(-1, *tensor.shape[2:]).index_select(0, self.flat)

    def unpacked(self, tensor: Tensor, empty: float = 0.0) -> Tensor:
        """The inverse of ``packed``, with ``empty`` where there is no slot."""
        batch = self.start.shape[0]
        out = tensor.new_full((batch * self.total, *tensor.shape[1:]), empty)
        return out.index_copy_(0, self.flat, tensor).view(batch, self.total, *tensor.shape[1:])

    @property
    def roomy(self) -> bool:
        """Whether it takes far more places than it has slots."""
        return self.start.shape[0] * self.total > _ROOMY * int(self.sizes.sum())


class Blocks:
    """The heads to which the blocks of a flat tensor belong, for a kernel that reads all blocks.

    Attributes:
        size: slots of a block, a power of two of about 1/32 of the mean size of a head.
        layout: one head after another, all starting at multiples of ``size``.
        kept: whether the result of ``found`` is kept between calls. It is not if blocks are so
            small that it would take more memory than the slots.
    """

    def __init__(self, sizes: Tensor, room: int = 0) -> None:
        self.size = _block(float((sizes + room).double().mean()))
        self.layout = Ragged.of(sizes, room, self.size)
        self.kept = self.size >= _WORTH_KEEPING
        self._found: tuple[Tensor, Tensor, Tensor] | None = None
        self._others: dict[int, Blocks] = {}

    def of_rows(self, rows: int) -> Blocks:
        """Blocks of some rows that are all like the first, without room."""
        if rows not in self._others:
            self._others[rows] = Blocks(self.layout.sizes[:1].expand(rows, -1))
        return self._others[rows]

    def moved(self, layout: Ragged) -> Blocks:
        """Blocks of the same size, of another layout."""
        twin = copy.copy(self)
        twin.layout, twin._found, twin._others = layout, None, {}
        return twin

    def to_state(self, held: Tensor) -> State:
        """The layout.

        Args:
            held: the current number of slots of every head, int64 ``[batch, heads]``.

        Raises:
            UnsupportedError: rows differ so much that most of the flat tensor is empty.
        """
        if Ragged(self.layout.start, held, self.layout.total).roomy:
            raise UnsupportedError(
                "the rows of this batch hold so different numbers of slots that most of their page "
                "is empty; save them one by one (batch_select_indices)"
            )
        state = State(values={"total": self.layout.total, "size": self.size})
        state.keep(start=self.layout.start)
        return state

    @staticmethod
    def from_state(reader: Reader, sizes: Tensor, held: Tensor, room: int) -> Blocks:
        """Restore the result of ``to_state``.

        Args:
            sizes: slots of every head without the appended ones.
            held: slots of every head with the appended ones.
            room: slots that can be appended to every head.
        """
        total, size = reader.whole("total"), reader.whole("size", 1, _MOST_BLOCK)
        start = reader.integers("start", sizes.shape, 0, total)
        ends = torch.cat([start[:, 1:], torch.full_like(start[:, :1], total)], dim=1)
        fits = size & (size - 1) == 0 and not total % size and not bool((start % size).any())
        if not fits or bool((start + held + room > ends).any()):
            raise reader.wrong("total", total, "the end of heads that have room side by side")
        if Ragged(start, held, total).roomy:
            raise reader.wrong("total", total, f"at most {_ROOMY} times the slots there are")
        reader.close()
        blocks = Blocks.__new__(Blocks)
        blocks.size, blocks.kept, blocks._found = size, size >= _WORTH_KEEPING, None
        blocks._others = {}
        blocks.layout = Ragged(start, sizes, total)
        return blocks

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors: the head of every block, int64 ``[batch * blocks]``, an index into
        ``[batch * heads]``; 0 for the blocks of a head and ``NOTHING`` for all others, float32
        ``[batch, heads, 1, blocks]``; and the number of the head's slots from the start of each
        block on, int64 ``[batch * blocks]``."""
        if self._found is not None:
            return self._found
        layout = self.layout
        batch, heads = layout.start.shape
        first = layout.start // self.size
        number = torch.arange(layout.total // self.size, device=first.device)
        head = (number >= first.unsqueeze(-1)).sum(1) - 1
        row = torch.arange(batch, device=first.device).unsqueeze(1) * heads
        behind = number * self.size - layout.start.gather(1, head)
        left = (layout.sizes.gather(1, head) - behind).flatten()
        every = torch.arange(heads, device=first.device).view(1, -1, 1)
        own = head.unsqueeze(1) == every
        foreign = torch.zeros_like(own, dtype=torch.float32).masked_fill_(~own, NOTHING)
        found = (head + row).flatten(), foreign.unsqueeze(2), left
        if self.kept:
            self._found = found
        return found

    def live(self, appended: int = 0) -> Tensor:
        """Which slots of every block exist after ``appended`` slots were appended to each head,
        bool ``[batch * blocks, size]``."""
        left = self.found()[2] + appended
        return torch.arange(self.size, device=left.device) < left.unsqueeze(1)

    def forget(self) -> None:
        """Release what ``found`` keeps."""
        self._found = None

    def tensors(self) -> list[Tensor]:
        """The tensors that are kept, for byte counting."""
        return list(self._found or ())


def _block(mean: float) -> int:
    """A power of two, about 1/32 of the mean size."""
    block = 1
    while block < _MOST_BLOCK and block * 2 * _PART <= mean:
        block *= 2
    return block


def flatten(tensor: Tensor, padded: Tensor, flat: Tensor, total: int, empty: float = 0.0) -> Tensor:
    """``[batch, heads, count, ...]`` as ``[batch, total, ...]``, ``empty`` where there is no
    slot."""
    batch, heads, count = tensor.shape[:3]
    out = tensor.new_full((batch * total, *tensor.shape[3:]), empty)
    rows = tensor.reshape(batch * heads * count, *tensor.shape[3:])
    out.index_copy_(0, flat, rows.index_select(0, padded))
    return out.view(batch, total, *tensor.shape[3:])


def unflatten(
    tensor: Tensor, padded: Tensor, flat: Tensor, shape: tuple[int, int, int], empty: float = 0.0
) -> Tensor:
    """``[batch, total, ...]`` as ``[batch, heads, count, ...]``, ``empty`` where a head has no
    slot."""
    rest = tensor.shape[2:]
    out = tensor.new_full((shape[0] * shape[1] * shape[2], *rest), empty)
    out.index_copy_(0, padded, tensor.reshape(-1, *rest).index_select(0, flat))
    return out.view(*shape, *rest)


def picked(slots: Slots, index: Tensor, there: Tensor) -> Slots:
    """The slots with the numbers ``index``, int64 ``[batch, heads, k]``. They are dead where
    ``there`` (bool) is False."""
    moved = slots.take(index)
    score = None if moved.score is None else moved.score * there
    return replace(moved.only(there), score=score)
