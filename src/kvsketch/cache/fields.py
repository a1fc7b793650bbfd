"""The fields of slots as pages hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.cache.kind import Kind
from kvsketch.slots import Slots
from kvsketch.state import Reader

#: what a slot may have besides its key and value
COLUMNS = ("mass", "positions", "score")
_WIDE = (torch.float32, torch.float64)


def stored(slots: Slots, sizes: Tensor | None) -> dict[str, Tensor]:
    """The fields of slots as a page has them: values as u / m, in the dtype of the keys."""
    fields = {name: tensor.detach() for name, tensor in slots.tensors().items()}
    if slots.mass is not None:
        weight = torch.where(slots.mass != 0, slots.mass, 1.0).unsqueeze(-1)
        fields["values"] = (fields["values"] / weight).to(slots.keys.dtype)
        says = slots.mass != 1
        if sizes is not None:
            says &= torch.arange(slots.count, device=sizes.device) < sizes.unsqueeze(-1)
        if not bool(says.any()):
            del fields["mass"]  # which says no more than the sizes do
    return fields


def with_room(tensor: Tensor, room: int, fill: float | None = None) -> Tensor:
    """A copy with room for more slots, which holds ``fill``; None: anything."""
    if not room:
        return owned(tensor)
    count = tensor.shape[2]
    buffer = tensor.new_empty((*tensor.shape[:2], count + room, *tensor.shape[3:]))
    buffer[:, :, :count] = tensor
    if fill is not None:
        buffer[:, :, count:] = fill
    return buffer


def owned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where it is a view, which would keep the larger one alive."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()


def read_fields(reader: Reader, lead: tuple[int, ...], kind: Kind) -> dict[str, Tensor]:
    """The fields of slots, as a state has them.

    Args:
        lead: axes before those of keys and values: ``(batch, heads, slots)``, or ``(slots,)``.
    """
    values = tuple({kind.dtype, *_WIDE})
    fields = {
        "keys": reader.tensor("keys", (*lead, kind.key_dim), kind.dtype),
        "values": reader.tensor("values", (*lead, kind.value_dim), *values),
    }
    return {**fields, **read_columns(reader, lead)}


def read_columns(reader: Reader, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """What slots have besides keys and values. A score may be infinite."""
    return {
        name: reader.tensor(name, lead, *_WIDE, allow=("inf",) if name == "score" else ())
        for name in COLUMNS
        if reader.has(name)
    }
