"""The layout shared by all tokens of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvsketch.slots import Slots
from kvsketch.state import Reader, name_of


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        batch, heads: rows and KV heads.
        key_dim, value_dim: of a slot.
        dtype: of the tokens.
    """

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(slots: Slots, dtype: torch.dtype) -> Kind:
        """Of slots, of tokens of a dtype."""
        batch, heads, _, key_dim = slots.keys.shape
        return Kind(batch, heads, key_dim, slots.values.shape[3], dtype)

    def rows(self, batch: int) -> Kind:
        """As many rows of one head each."""
        return Kind(batch, 1, self.key_dim, self.value_dim, self.dtype)

    def values(self) -> dict[str, Any]:
        """For a state."""
        return {**self.__dict__, "dtype": name_of(self.dtype)}

    @staticmethod
    def read(reader: Reader) -> Kind:
        """What ``values`` said."""
        names = ("batch", "heads", "key_dim", "value_dim")
        batch, heads, key_dim, value_dim = (reader.whole(name, 1, 1 << 20) for name in names)
        dtype = reader.dtype("dtype")
        reader.close()
        return Kind(batch, heads, key_dim, value_dim, dtype)
