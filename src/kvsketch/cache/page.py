"""A page of slots: appended to in place, read as views; its middle may be quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..slots import FIELDS, Slots, compute_dtype
from .quantized import Quantized, quantize

_PACKED = ("keys", "values")

T = TypeVar("T", bound="TransientPage")


class Page:
    """Buffers for ``capacity`` slots per KV head, of which the first ``count`` are in use.

    Args:
        slots: the first content; decides dtype, device and which fields exist.
        capacity: slots per KV head, at least ``slots.count``. Equal means no copy is made.
    """

    #: whether ``slots`` are a copy that lives from ``append`` to ``release``
    transient: ClassVar[bool] = False

    def __init__(self, slots: Slots, capacity: int) -> None:
        self.count = slots.count
        self.capacity = capacity
        if capacity == slots.count:
            # clone only views: a view would keep the larger tensor it was cut from alive
            self._buffers = {name: _owned(tensor) for name, tensor in slots.tensors().items()}
        else:
            self._buffers = {
                name: _padded(tensor, capacity) for name, tensor in slots.tensors().items()
            }
        self._view: Slots | None = None

    @property
    def room(self) -> int:
        return self.capacity - self.count

    @property
    def slots(self) -> Slots:
        """The slots in use, as views."""
        if self._view is None:
            self._view = Slots(
                **{name: b.narrow(2, 0, self.count) for name, b in self._buffers.items()}
            )
        return self._view

    def append(self, new: Slots) -> None:
        """Write ``new`` behind the slots in use; it must fit into ``room``."""
        start, length = self.count, new.count
        incoming = new.tensors()
        if "mass" in incoming and "mass" not in self._buffers:
            mass = incoming["mass"]
            places = self._place("mass", self.capacity)
            self._buffers["mass"] = mass.new_ones(*mass.shape[:2], places)
        for name in FIELDS:
            if name in self._buffers:
                tensor = incoming.get(name)
                target = self._buffers[name].narrow(2, self._place(name, start), length)
                if tensor is None:  # mass of exact tokens is 1, a new token has no score yet
                    target.fill_(1.0 if name == "mass" else 0.0)
                else:
                    target.copy_(tensor)
        self.count = start + length
        self._view = None

    def release(self) -> None:
        """The attention over ``slots`` is done."""

    def drop(self, tokens: int) -> None:
        """Forget the last ``tokens`` slots, which were appended."""
        self.count -= tokens
        self._view = None

    def rewrite_last(self, new: Slots) -> None:
        """Overwrite the last ``new.count`` slots in use."""
        self.count -= new.count
        self.append(new)

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots in use, ``[batch, heads, count]``."""
        if "score" not in self._buffers:
            self._buffers["score"] = score.new_zeros(*score.shape[:2], self.capacity)
        self._buffers["score"][:, :, : self.count] = score
        self._view = None

    def grown(self, capacity: int) -> Page:
        """The same slots with room for more."""
        return Page(self.slots, capacity)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Page:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to everything held."""
        return Page(self.slots.map(fn), self.capacity)

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte counting."""
        return list(self._buffers.values())

    def _place(self, name: str, slot: int) -> int:
        """Where slot number ``slot`` lies in the buffer of a field."""
        return slot


class TransientPage(Page):
    """Base class of the pages whose ``slots`` are a copy, made from what is held. Between
    ``append`` and ``release`` (while one layer's attention runs) it is kept, and counted by
    ``tensors``; at any other time it is made for the caller alone."""

    transient = True
    _open = False  # between append and release

    def append(self, new: Slots) -> None:
        """Write ``new`` behind the slots in use, as given; it must fit into ``room``."""
        super().append(new)
        self._open = True

    def release(self) -> None:
        """The attention over ``slots`` is done: let the copy go."""
        self._view = None
        self._open = False

    def grown(self: T, capacity: int) -> T:
        """The same slots with room for more."""
        twin = copy.copy(self)
        twin.release()
        twin._buffers = {
            name: _padded(
                b.narrow(2, 0, self._place(name, self.count)), self._place(name, capacity)
            )
            for name, b in self._buffers.items()
        }
        twin.capacity = capacity
        return twin

    def map(self: T, fn: Callable[[Tensor], Tensor]) -> T:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to its buffers."""
        twin = copy.copy(self)
        twin.release()
        twin._buffers = {name: _owned(fn(tensor)) for name, tensor in self._buffers.items()}
        return twin


class QuantizedPage(TransientPage):
    """A page that holds its first ``sink`` and last slots, and what is appended, as given, and the
    keys and values between them in 8 or 4 bits. Masses, positions and scores stay as they are. Of
    a value-sum, u / m is stored (u where m = 0): a method that gives a slot another weight does not
    change it.

    ``slots`` are a dequantised copy (``TransientPage``). Writing into ``slots.score`` writes into
    the page.

    Args:
        slots: the first content. Dead slots have no influence on the others' precision.
        capacity: slots per KV head.
        bits: 8 or 4.
        sink: slots at the start that stay as given.
        recent: slots at the end that do.
        previous: the page these slots come from: decides the dtype of what stays as given, and
            keeps slots that are still the same at the same bits.
    """

    def __init__(
        self,
        slots: Slots,
        capacity: int,
        bits: int,
        sink: int,
        recent: int,
        previous: QuantizedPage | None = None,
    ) -> None:
        self.count = slots.count
        self.capacity = capacity
        self._bits = bits
        self._first = min(sink, slots.count)
        self._hidden = max(0, slots.count - sink - recent)  # slots that are quantised
        middle = slots.narrow(self._first, self._hidden)
        live, weight = middle.live(), _weight(middle.mass)
        self._packed: dict[str, Quantized] = {}
        self._buffers = {}
        for name, tensor in slots.tensors().items():
            if name in _PACKED and self._hidden:
                rows = getattr(middle, name)
                self._packed[name] = quantize(
                    rows if name == "keys" or weight is None else rows / weight,
                    bits,
                    per_channel=name == "keys",
                    live=live,
                    previous=None if previous is None else previous._packed.get(name),
                )
                last = tensor[:, :, self._first + self._hidden :]
                tensor = torch.cat([tensor[:, :, : self._first], last], dim=2)
            if name in _PACKED and previous is not None:
                tensor = tensor.to(previous._buffers[name].dtype)
            self._buffers[name] = _padded(tensor, self._place(name, capacity))
        self._view = None

    @property
    def slots(self) -> Slots:
        """The slots in use, keys and values dequantised to the dtype they came in."""
        slots = self.read()
        self._view = slots if self._open else None
        return slots

    def read(self, exactly: bool = False) -> Slots:
        """As ``slots``. ``exactly``: in float32 at least, which gives back what is stored without
        rounding it to the model's dtype."""
        stored = {name: self._buffers[name].dtype for name in _PACKED}
        dtypes = {name: compute_dtype(t) for name, t in stored.items()} if exactly else stored
        if self._view is not None and dtypes == stored:
            return self._view
        fields = {}
        for name, buffer in self._buffers.items():
            used = buffer.narrow(2, 0, self._place(name, self.count))
            if name in _PACKED:
                fields[name] = self._dequantized(name, used, dtypes[name])
            else:
                fields[name] = used
        return Slots(**fields)

    def _dequantized(self, name: str, used: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._hidden:
            return used.to(dtype)
        end = self._first + self._hidden
        batch, heads, _, dim = used.shape
        out = used.new_empty((batch, heads, self.count, dim), dtype=dtype)
        out[:, :, : self._first] = used[:, :, : self._first]
        middle = out[:, :, self._first : end]
        self._packed[name].read(middle)
        if name == "values" and "mass" in self._buffers:
            weight = _weight(self._buffers["mass"].narrow(2, self._first, self._hidden))
            assert weight is not None
            middle.mul_(weight)
        out[:, :, end:] = used[:, :, self._first :]
        return out

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to everything held."""
        twin = super().map(fn)
        twin._packed = {
            name: part.map(lambda t: _owned(fn(t))) for name, part in self._packed.items()
        }
        return twin

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte counting."""
        held = super().tensors()
        for part in self._packed.values():
            held += part.tensors()
        return held if self._view is None else [*held, self._view.keys, self._view.values]

    def _place(self, name: str, slot: int) -> int:
        return slot - self._hidden if name in _PACKED else slot


def _weight(mass: Tensor | None) -> Tensor | None:
    """What value-sums are divided by, ``[batch, heads, slots, 1]``."""
    return None if mass is None else torch.where(mass != 0, mass, 1.0).unsqueeze(-1)


def _owned(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()


def _padded(tensor: Tensor, capacity: int) -> Tensor:
    shape = (*tensor.shape[:2], capacity, *tensor.shape[3:])
    buffer = tensor.new_empty(shape)
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer
