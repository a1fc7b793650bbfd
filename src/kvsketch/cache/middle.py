"""The slots of a layer that are held in 8 or 4 bits: read only, heads of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ..slots import Slots, compute_dtype
from .quantized import Quantized, quantize
from .ragged import Blocks, Ragged, flatten, unflatten
from .storage import Bits


class Middle:
    """Keys and mean values u / m (u where m = 0) in few bits; masses, positions and scores as they
    are. A value of 0 stays exactly 0, so that a method that gives a slot another weight changes
    nothing here.

    Tensors are laid out as those of a ``Page`` without room: ``[batch, heads, slots, ...]``, or
    ``[batch, total, ...]`` where heads differ in size.

    Args:
        slots: ``[batch, heads, n, ...]``, of every head its own slots first. Slots read from
            ``previous`` in float32 get the same codes again.
        sizes: how many slots each head has, int64 ``[batch, heads]``, all <= n.
        bits: of keys and of values, 8 or 4.
        previous: where centres and units come from.

    Attributes:
        appended, room: 0, as nothing can be appended.
        sizes: as given.
        count: slots of the largest head.
        packed: keys and values.
        fields: mass, positions, score, as far as there are any.
        blocks: of heads of different size; None: all have ``count``.
    """

    appended = room = 0

    def __init__(
        self, slots: Slots, sizes: Tensor, bits: Bits, previous: Middle | None = None
    ) -> None:
        self.batch, self.heads, self.count = slots.keys.shape[:3]
        self.sizes = sizes
        self.blocks = None if bool((sizes == self.count).all()) else Blocks(sizes)
        there = torch.arange(self.count, device=sizes.device) < sizes.unsqueeze(-1)
        live = slots.live()
        live = there if live is None else there & live
        weight = _weight(slots.mass)
        means = slots.values if weight is None else slots.values / weight
        self.packed: dict[str, Quantized] = {}
        for name, tensor in (("keys", slots.keys), ("values", means)):
            part = quantize(
                tensor,
                bits.keys if name == "keys" else bits.values,
                per_channel=name == "keys",
                live=None if bool(live.all()) else live,
                previous=None if previous is None else previous.packed[name],
            )
            self.packed[name] = part.map_slots(self._laid)
        self.fields = {
            name: self._laid(tensor)
            for name, tensor in slots.tensors().items()
            if name not in self.packed
        }

    def _laid(self, tensor: Tensor) -> Tensor:
        """From ``[batch, heads, n, ...]`` to how it is held."""
        if self.blocks is None:
            return tensor.contiguous()
        layout = self.blocks.layout
        return flatten(tensor, *layout.places(self.count), layout.total)

    def _padded(self, tensor: Tensor) -> Tensor:
        """And back, with zeros behind the slots of a head."""
        if self.blocks is None:
            return tensor
        shape = (self.batch, self.heads, self.count)
        return unflatten(tensor, *self.blocks.layout.places(self.count), shape)

    def read(self, dtype: torch.dtype) -> Slots:
        """The slots in a floating point dtype ``[batch, heads, n, ...]``, a head's own first, with
        anything behind them. Value-sums come in float32 at least."""
        fields = {name: self._padded(tensor) for name, tensor in self.fields.items()}
        for name, part in self.packed.items():
            padded = part.map_slots(self._padded)
            out = torch.empty(
                *padded.codes.shape[:3], part.dim, dtype=dtype, device=part.codes.device
            )
            padded.read(out)
            fields[name] = out
        weight = _weight(fields.get("mass"))
        if weight is not None:
            fields["values"] = fields["values"].to(compute_dtype(dtype)) * weight
        return Slots(**fields)

    @property
    def slots(self) -> Slots:
        """The slots in float32, dead ones behind a head's own."""
        slots = self.read(torch.float32)
        if self.blocks is None:
            return slots
        return slots.only(
            torch.arange(self.count, device=self.sizes.device) < self.sizes[..., None]
        )

    def even(self, name: str) -> Tensor:
        """A field of heads of equal size, ``[batch, heads, slots]``."""
        return self.fields[name]

    @property
    def even_mass(self) -> Tensor | None:
        """Masses of heads of equal size; None: all are 1."""
        return self.fields.get("mass")

    def spans(self) -> tuple[Tensor, Tensor]:
        """Where each head's slots start in its row of the flat tensors, and how many they are,
        int64 ``[batch, heads]``."""
        if self.blocks is not None:
            return self.blocks.layout.start, self.sizes
        start = torch.arange(self.heads, device=self.sizes.device) * self.count
        return start.expand(self.batch, -1).contiguous(), self.sizes

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots, ``[batch, heads, n]``, a head's own first."""
        self.fields["score"] = self._laid(score)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Middle:
        """With ``fn`` (which acts on axis 0, the batch) applied to everything held."""
        twin = copy.copy(self)
        twin.sizes = fn(self.sizes)
        twin.batch = twin.sizes.shape[0]
        twin.packed = {name: part.map(fn) for name, part in self.packed.items()}
        twin.fields = {name: fn(tensor) for name, tensor in self.fields.items()}
        if self.blocks is not None:
            layout = self.blocks.layout
            twin.blocks = self.blocks.moved(Ragged(fn(layout.start), twin.sizes, layout.total))
        return twin

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte counting."""
        held = list(self.fields.values())
        for part in self.packed.values():
            held += part.tensors()
        return held if self.blocks is None else [*held, *self.blocks.tensors()]


def _weight(mass: Tensor | None) -> Tensor | None:
    """What value-sums are divided by."""
    return None if mass is None else torch.where(mass != 0, mass, 1.0).unsqueeze(-1)
