"""The fields of slots as pages hold them: keys, mean values u / m, and log m."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.page.kind import Kind
from kvsketch.partial import NOTHING, log_mass
from kvsketch.slots import Slots
from kvsketch.state import Reader

#: What a slot may have besides its key and its value. ``log_mass`` is log m, which attention adds
#: to the scores; ``NOTHING`` in a dead slot. Without the field, every slot is an exact token.
COLUMNS = ("log_mass", "positions", "score")
#: Values of fields that a new token has unless it brings others.
NEW = {"log_mass": 0.0, "score": 0.0}
#: Values of fields where there is no slot; of all others they are 0.
EMPTY = {"log_mass": NOTHING}
_WIDE = (torch.float32, torch.float64)


def fields_of(slots: Slots) -> dict[str, Tensor]:
    """The fields of slots. Rounding u / m to 16 bits has the same relative error for a slot of a
    thousand tokens as for one. Values are in the dtype of ``slots``."""
    fields = slots.tensors()
    mass = fields.pop("mass", None)
    if mass is not None:
        fields["values"] = slots.mean_values()
        fields["log_mass"] = log_mass(mass)
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
    """The keys and values of a state, and the other fields.

    Args:
        lead: axes before those of keys and values: ``(batch, heads, slots)``, or ``(slots,)``.
    """
    fields = {
        "keys": reader.tensor("keys", (*lead, kind.key_dim), kind.dtype),
        "values": reader.tensor("values", (*lead, kind.value_dim), kind.dtype),
    }
    return {**fields, **read_columns(reader, lead)}


def read_columns(reader: Reader, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """What slots have besides keys and values. A score may be infinite."""
    return {
        name: reader.tensor(name, lead, *_WIDE, allow=("inf",) if name == "score" else ())
        for name in COLUMNS
        if reader.has(name)
    }
