"""The bytes of a page in two parts: a window of slots as the model has them, and a middle in fewer
bits, whose KV heads may differ in size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.middle import Middle
from ..cache.storage import Bits
from ..slots import Slots
from .layout import Fields, Layout, Shape, bytes_of, views


@dataclass(frozen=True)
class SplitFields(Fields):
    """The parts of all pages of a layer: those of the window, and what a ``Middle`` holds.

    Attributes:
        middle: its ``contents``, ``[pages, ...]`` each.
    """

    middle: tuple[Tensor, ...]

    def parts(self) -> list[Tensor]:
        """All of them."""
        return [*super().parts(), *self.middle]


@dataclass(frozen=True)
class SplitLayout:
    """Where the parts of a page lie.

    Attributes:
        window: of sinks, recent window and buffer, which are even.
        sizes: slots of each KV head in the middle, >= 1.
        bits: of keys and of values there, 16, 8 or 4.
    """

    window: Layout
    sizes: tuple[int, ...]
    bits: Bits

    @property
    def queries(self) -> int:
        """Last queries that are kept for a method."""
        return self.window.queries

    @property
    def slots(self) -> int:
        """Of a KV head, on average."""
        return self.window.slots + sum(self.sizes) // len(self.sizes)

    def middle(self, rows: int = 1, device: torch.device | None = None) -> Middle:
        """Where the slots of so many requests lie, without the slots."""
        shape = (1, self.window.heads, 1)
        nothing = torch.zeros(shape)
        one = Slots(
            torch.zeros(*shape, self.window.head_dim, dtype=self.window.dtype),
            torch.zeros(*shape, self.window.value_dim, dtype=self.window.dtype),
            nothing,
            score=nothing.clone() if self.window.scored else None,
        )
        sizes = torch.tensor([self.sizes], device=device).expand(rows, -1)
        return Middle.hollow(one, sizes, self.bits)

    def _shapes(self) -> list[Shape]:
        return [(tuple(t.shape[1:]), t.dtype) for t in self.middle().contents()]

    @property
    def bytes(self) -> int:
        """Of a page."""
        return self.window.bytes + bytes_of(self._shapes())

    def fields(self, raw: Tensor) -> SplitFields:
        """Views of pages.

        Args:
            raw: uint8 ``[pages, bytes]``, whose rows start at multiples of 64 bytes.
        """
        window = self.window.fields(raw)
        middle = views(raw[:, self.window.bytes :], self._shapes())
        return SplitFields(**vars(window), middle=tuple(middle))
