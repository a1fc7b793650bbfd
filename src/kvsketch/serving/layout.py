"""The bytes of a request's page in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Every part starts at a multiple of so many bytes.
_ALIGNED = 64


@dataclass(frozen=True)
class Fields:
    """The parts of all pages of a layer, as views: ``[pages, num_key_value_heads, slots, ...]``.

    Attributes:
        keys: ``[..., head_dim]``.
        values: means u / m, ``[..., value_dim]``.
        log_mass: log m, float32, which is what attention adds to scores; ``NOTHING`` where no slot
            is.
        score: of the method, float32.
        queries: the last ones before a compression, ``[pages, num_attention_heads, queries,
            head_dim]``.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    score: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Layout:
    """Where the parts of a page lie.

    Attributes:
        heads: KV heads; group: query heads of each.
        slots: of each KV head.
        head_dim, value_dim: channels.
        queries: last queries that are kept for a method, of each query head.
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

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
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
        """Of a page."""
        return sum(_padded(shape, dtype) for shape, dtype in self._shapes().values())

    def fields(self, raw: Tensor) -> Fields:
        """Views of pages.

        Args:
            raw: uint8 ``[pages, bytes]``, whose rows start at multiples of 64 bytes.
        """
        found, at = {}, 0
        for name, (shape, dtype) in self._shapes().items():
            count = torch.Size(shape).numel() * dtype.itemsize
            part = raw[:, at : at + count].view(dtype)
            found[name] = part.view(len(raw), *shape)
            at += _padded(shape, dtype)
        return Fields(**found)


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // _ALIGNED) * _ALIGNED
