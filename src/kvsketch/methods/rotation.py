"""How rotary position embeddings rotate queries and keys (Su et al., RoFormer, 2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.pieces import at_once


@dataclass(frozen=True)
class Turn:
    """Rotates keys or queries by a number of positions.

    Attributes:
        frequencies: radians per position, float ``[pairs]``.
        neighbours: pairs are channels 2i and 2i + 1, else i and i + pairs.
    """

    frequencies: Tensor
    neighbours: bool

    def __call__(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """``[..., head_dim]`` keys ``by`` positions further on, in their dtype. Channels beyond the
        pairs are not rotated.

        Args:
            by: the same number for all, or numbers that are broadcast with ``keys[..., 0]``.
        """
        frequencies = self.frequencies.double().to(keys.device)
        if isinstance(by, Tensor):
            by = by.to(keys.device, torch.float64).unsqueeze(-1)
        angle = frequencies * by
        cos, sin = (f(angle).to(torch.promote_types(keys.dtype, torch.float32)) for f in _BOTH)
        lead = (keys[..., 0] + cos[..., 0]).shape
        turned = keys.new_empty((*lead, keys.shape[-1]))
        pieces = [(turned, keys)]
        if cos.dim() == 1 and keys.dim() > 1 and keys.numel():  # through the processor's cache
            step = max(1, at_once(keys, _PIECE) * keys.shape[-2] // keys.numel())
            places = [slice(at, at + step) for at in range(0, keys.shape[-2], step)]
            pieces = [(turned[..., some, :], keys[..., some, :]) for some in places]
        for to, piece in pieces:
            first, second, same = self._parts(to)
            a, b, rest = self._parts(piece)
            a, b = a.to(cos.dtype), b.to(cos.dtype)
            first.copy_(a * cos - b * sin)
            second.copy_(b * cos + a * sin)
            same.copy_(rest)
        return turned

    def norms(self, keys: Tensor) -> Tensor:
        """The lengths of the pairs of channels that are rotated together, and the absolute values
        of channels that are not rotated: ``[..., pairs + channels not rotated]``. They do not
        depend on the position."""
        a, b, rest = self._parts(keys)
        return torch.cat([torch.hypot(a, b), rest.abs()], dim=-1)

    def _parts(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first and the second channel of every pair, and the channels that are not rotated."""
        pairs = len(self.frequencies)
        turned, rest = keys[..., : 2 * pairs], keys[..., 2 * pairs :]
        if self.neighbours:
            return turned[..., 0::2], turned[..., 1::2], rest
        return turned[..., :pairs], turned[..., pairs:], rest


_BOTH = (torch.cos, torch.sin)
# Numbers that are rotated at a time on a CPU.
_PIECE = 1 << 17
