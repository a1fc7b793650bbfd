"""The layout of a page in two parts: a window of slots in the model's dtype, and a middle in 16, 8
or 4 bits whose KV heads may have different numbers of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.cache.middle import Middle
from kvsketch.cache.storage import Bits
from kvsketch.serving.layout import Fields, Layout, Shape, bytes_of, views
from kvsketch.slots import Slots


@dataclass(frozen=True)
class SplitFields(Fields):
    """The parts of all pages of a layer: those of the window, and those of the middle.

    Attributes:
        middle: the ``contents`` of a ``Middle``, ``[pages, ...]`` each.
    """

    middle: tuple[Tensor, ...]

    def parts(self) -> list[Tensor]:
        """All parts."""
        return [*super().parts(), *self.middle]


@dataclass(frozen=True)
class SplitLayout:
    """Where the parts of a page are.

    Attributes:
        window: layout of sinks, recent window and buffer, the same for all KV heads.
        sizes: slots of each KV head in the middle, >= 1.
        bits: of keys and of values in the middle, 16, 8 or 4.
    """

    window: Layout
    sizes: tuple[int, ...]
    bits: Bits

    @property
    def queries(self) -> int:
        """How many of the last queries are kept for the method."""
        return self.window.queries

    @property
    def slots(self) -> int:
        """Slots of a page per KV head, on average."""
        return self.window.slots + sum(self.sizes) // len(self.sizes)

    def middle(self, rows: int = 1, device: torch.device | None = None) -> Middle:
        """A middle of ``rows`` requests that has shapes and offsets but no contents."""
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
        """Bytes of a page."""
        return self.window.bytes + bytes_of(self._shapes())

    def fields(self, raw: Tensor) -> SplitFields:
        """Views of pages.

        Args:
            raw: uint8 ``[pages, bytes]``, whose rows start at multiples of 64 bytes.
        """
        window = self.window.fields(raw)
        middle = views(raw[:, self.window.bytes :], self._shapes())
        return SplitFields(**vars(window), middle=tuple(middle))
