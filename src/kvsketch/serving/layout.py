"""The layout in bytes of a request's page in one layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]

# Every part starts at a multiple of so many bytes.
_ALIGNED = 64


@dataclass(frozen=True)
class Fields:
    """The parts of all pages of a layer, as views: ``[pages, num_key_value_heads, slots, ...]``.

    Attributes:
        keys: ``[..., head_dim]``.
        values: means u / m, ``[..., value_dim]``.
        log_mass: log m, float32, which attention adds to the scores; ``NOTHING`` where a slot is
            empty.
        score: of the method, float32.
        queries: the last queries before a compression, ``[pages, num_attention_heads, queries,
            head_dim]``.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    score: Tensor
    queries: Tensor

    def parts(self) -> list[Tensor]:
        """All parts."""
        return [self.keys, self.values, self.log_mass, self.score, self.queries]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a page are.

    Attributes:
        heads: KV heads; group: query heads per KV head.
        slots: of each KV head.
        head_dim, value_dim: channels.
        queries: how many of the last queries are kept for the method, per query head.
        scored: whether the method has scores.
        dtype: of keys, values and queries.
    """

    heads: int
    group: int
    slots: int
    head_dim: int
    value_dim: int
    queries: int
    scored: bool
    dtype: torch.dtype

    def _shapes(self) -> dict[str, Shape]:
        each = (self.heads, self.slots)
        scores = each if self.scored else (self.heads, 0)
        return {
            "keys": ((*each, self.head_dim), self.dtype),
            "values": ((*each, self.value_dim), self.dtype),
            "log_mass": (each, torch.float32),
            "score": (scores, torch.float32),
            "queries": ((self.heads * self.group, self.queries, self.head_dim), self.dtype),
        }

    @property
    def bytes(self) -> int:
        """Bytes of a page."""
        return bytes_of(self._shapes().values())

    def fields(self, raw: Tensor) -> Fields:
        """Views of pages.

        Args:
            raw: uint8 ``[pages, bytes]``, whose rows start at multiples of 64 bytes.
        """
        shapes = self._shapes()
        return Fields(**dict(zip(shapes, views(raw, shapes.values()), strict=True)))


def bytes_of(shapes: Iterable[Shape]) -> int:
    """Bytes of parts with these shapes and dtypes, each aligned to 64 bytes."""
    return sum(map(_padded, shapes))


def views(raw: Tensor, shapes: Iterable[Shape]) -> list[Tensor]:
    """The consecutive parts of pages as views, ``[pages, *shape]`` each."""
    found, at = [], 0
    for shape, dtype in shapes:
        part = raw[:, at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype)
        found.append(part.view(len(raw), *shape))
        at += _padded((shape, dtype))
    return found


def _padded(part: Shape) -> int:
    shape, dtype = part
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // _ALIGNED) * _ALIGNED
