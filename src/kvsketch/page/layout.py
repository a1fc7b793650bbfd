"""Pages in memory of a serving engine: where the parts of a page are in its bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.page.memory import of_contents
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.ragged import Blocks
from kvsketch.slots import Slots

# Every tensor starts at a multiple of so many bytes.
_ALIGNED = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """The bytes of a request's page in one layer. It has a window of exact slots, and, if there is
    a ``middle``, slots of any bits between its sinks and its recent tokens.

    Attributes:
        heads: KV heads; group: query heads per KV head.
        slots: of each KV head in the window.
        head_dim, value_dim: channels.
        queries: how many of the last queries are kept for the method, per query head.
        scored: whether the method has scores.
        dtype: of exact keys and values, and of queries.
        middle: slots of each KV head in the middle, >= 1; empty: there is none.
        bits: of keys and values in the middle.
    """

    heads: int
    group: int
    slots: int
    head_dim: int
    value_dim: int
    queries: int
    scored: bool
    dtype: torch.dtype
    middle: tuple[int, ...] = ()
    bits: Bits = FULL

    @property
    def average(self) -> int:
        """Slots of a page per KV head, on average."""
        return self.slots + (sum(self.middle) // len(self.middle) if self.middle else 0)

    @property
    def uneven(self) -> bool:
        """Whether heads have different numbers of slots in the middle."""
        return len(set(self.middle)) > 1

    @property
    def bytes(self) -> int:
        """Bytes of a page."""
        return sum(map(_padded, self._tensors(_CPU)))

    def _tensors(self, device: torch.device) -> list[Tensor]:
        """A row of the queries and of every tensor of the parts, as views that take no memory."""
        shape = (1, self.heads * self.group, self.queries, self.head_dim)
        queries = torch.zeros(1, dtype=self.dtype, device="cpu").expand(shape)
        return [queries, *(t for part in _shells(self, device) for t in part.contents())]

    def views(self, raw: Tensor) -> tuple[Page, Tensor]:
        """Pages in some memory, without a copy.

        Args:
            raw: uint8 ``[pages, bytes]``, whose rows start at multiples of 64 bytes.

        Returns:
            A row of the page for each of them, whose log masses say which slots there are; and the
            last queries before a compression, ``[pages, num_attention_heads, queries, head_dim]``.

        Raises:
            InputError: memory of other sizes or not of bytes.
        """
        if raw.dim() != 2 or raw.shape[1] < self.bytes or raw.dtype != torch.uint8:
            raise InputError(
                f"raw is {raw.dtype} {tuple(raw.shape)} and must be uint8 [pages, bytes] with at "
                f"least {self.bytes} bytes for a page of this layout"
            )
        if raw.data_ptr() % _ALIGNED or (len(raw) > 1 and raw.stride(0) % _ALIGNED):
            raise InputError(
                f"raw starts at {raw.data_ptr()} with {raw.stride(0)} bytes from page to page, and "
                f"both must be multiples of {_ALIGNED}"
            )
        tensors = _views(raw, self._tensors(raw.device))
        queries = next(tensors)
        window, *middle = [
            of_contents(part, tensors, len(raw)) for part in _shells(self, raw.device)
        ]
        return Page.of_parts(window, *middle), queries

    def sizes(self, rows: int, device: torch.device) -> Tensor:
        """Slots of every head in the middle, int64 ``[rows, heads]``."""
        return torch.tensor([self.middle], device=device).expand(rows, -1)


@functools.lru_cache(maxsize=256)
def _shells(layout: Layout, device: torch.device) -> list[Part]:
    """A row of the window, and of the middle if there is one: shapes and places without memory."""
    parts = [_shell(layout, FULL, (layout.slots,) * layout.heads, device)]
    if layout.middle:
        parts.append(_shell(layout, layout.bits, layout.middle, device))
    return parts


def _shell(layout: Layout, bits: Bits, sizes: tuple[int, ...], device: torch.device) -> Part:
    nothing = torch.zeros(1, layout.heads, 1, dtype=torch.float32, device=device)
    keys, values = (
        torch.zeros(1, layout.heads, 1, dim, dtype=layout.dtype, device=device)
        for dim in (layout.head_dim, layout.value_dim)
    )
    one = Part(Slots(keys, values, nothing, score=nothing if layout.scored else None), bits=bits)
    count = max(sizes)
    each = None if min(sizes) == count else torch.tensor([sizes], device=device)
    blocks = None if each is None else Blocks(each)

    def spread(tensor: Tensor) -> Tensor:
        if blocks is None:
            return tensor.expand(*tensor.shape[:2], count, *tensor.shape[3:])
        return tensor[:, 0].expand(1, blocks.layout.total, *tensor.shape[3:])

    return Part.over(
        {name: spread(tensor) for name, tensor in one.fields.items()},
        {n: replace(few.map_slots(spread), count=count) for n, few in one.packed.items()},
        (1, layout.heads, count),
        each,
        blocks,
    )


def _views(raw: Tensor, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """The consecutive tensors of pages, of the shapes and dtypes of ``rows``."""
    at = 0
    for row in rows:
        part = raw[:, at : at + row.numel() * row.itemsize].view(row.dtype)
        yield part.view(len(raw), *row.shape[1:])
        at += _padded(row)


def _padded(row: Tensor) -> int:
    """Bytes of a tensor of one page, aligned."""
    return -(-row.numel() * row.itemsize // _ALIGNED) * _ALIGNED
