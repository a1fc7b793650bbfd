"""A page whose middle is held in 8 or 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ..slots import Slots, compute_dtype
from .page import Page, owned
from .quantized import Quantized, quantize
from .ragged import Ragged, flatten, to_the_end, unflatten
from .storage import Bits

_PACKED = ("keys", "values")


class QuantizedPage:
    """Every head's first ``sink`` and last slots, and what is appended, as given, and the keys and
    values between them in 8 or 4 bits. Masses, positions and scores stay as they are. Of a
    value-sum, u / m is stored (u where m = 0): a method that gives a slot another weight does not
    change it.

    ``open`` makes the dequantised page that attention reads. It lives, and is counted by
    ``tensors``, until ``release``, while the attention of one layer runs.

    Args:
        slots: of every head its own slots first, as for ``Page``. Dead slots have no influence on
            the others' precision.
        sizes: how many slots each head has, int64 ``[batch, heads]``; None: all the same.
        room: slots that can be appended to every head.
        bits: of keys and of values, 8 or 4.
        sink: slots at the start that stay as given.
        recent: slots at the end that do.
        previous: the page these slots come from, read with ``exactly``: slots that are still the
            same keep their bits.
    """

    def __init__(
        self,
        slots: Slots,
        sizes: Tensor | None,
        room: int,
        bits: Bits,
        sink: int,
        recent: int,
        previous: QuantizedPage | None = None,
    ) -> None:
        self.batch, self.heads, self.base = slots.keys.shape[:3]
        self.appended, self.room, self.sizes = 0, room, sizes
        self._opened: Page | None = None
        device = slots.keys.device
        every = torch.full((self.batch, self.heads), self.base) if sizes is None else sizes
        first = every.clamp(max=sink)
        last = (every - first).clamp(max=recent)
        # Of every head: exact slots before the middle, slots in the middle, exact slots behind it.
        self._parts = torch.stack([first, every - first - last, last]).to(device).unsqueeze(-1)
        self._kept = int((first + last).max())
        self._hidden = int(self._parts[1].max())
        exact_at, middle_at = self._exact_at(), self._middle_at()
        mass = slots.mass
        weight = None if mass is None else torch.where(mass != 0, mass, 1.0).unsqueeze(-1)
        means = slots.values if weight is None else slots.values / weight
        self._dtype: torch.dtype = slots.keys.dtype if previous is None else previous._dtype
        self._exact = {
            "keys": _taken(slots.keys, exact_at, room).to(self._dtype),
            "values": _taken(means, exact_at, room).to(self._dtype),
        }
        self._columns = {
            name: _padded(tensor, room)
            for name, tensor in slots.tensors().items()
            if name not in _PACKED
        }
        self._packed: dict[str, Quantized] = {}
        self._ragged: Ragged | None = None
        if sizes is not None:
            self._ragged = Ragged.of(self._parts[1].squeeze(-1))
        if self._hidden:
            live = slots.live()
            there = middle_at < self.base
            if live is not None:
                there = there & live.gather(-1, middle_at.clamp(max=self.base - 1))
            for name, tensor in (("keys", slots.keys), ("values", means)):
                self._packed[name] = self._flat(
                    quantize(
                        _taken(tensor, middle_at, 0),
                        bits.keys if name == "keys" else bits.values,
                        per_channel=name == "keys",
                        live=None if bool(there.all()) else there,
                        previous=None if previous is None else previous._packed.get(name),
                    )
                )

    def _exact_at(self) -> Tensor:
        """Which of a head's slots its exact ones are, ``[batch, heads, kept]``; ``base``: none."""
        first, middle, last = self._parts
        column = torch.arange(self._kept, device=first.device)
        place = torch.where(column < first, column, column + middle)
        return torch.where(column < first + last, place, self.base)

    def _middle_at(self) -> Tensor:
        """Which of a head's slots the quantised ones are, ``[batch, heads, hidden]``."""
        first, middle, _ = self._parts
        column = torch.arange(self._hidden, device=first.device)
        return torch.where(column < middle, column + first, self.base)

    def _flat(self, part: Quantized) -> Quantized:
        """Heads of different size one behind the other: no byte for a slot that is not there."""
        if self._ragged is None:
            return part
        places = self._ragged.places(self._hidden)
        total = self._ragged.total
        return part.map_slots(lambda t: flatten(t, *places, total))

    def _unflat(self, part: Quantized) -> Quantized:
        if self._ragged is None:
            return part
        places = self._ragged.places(self._hidden)
        shape = (self.batch, self.heads, self._hidden)
        return part.map_slots(lambda t: unflatten(t, *places, shape))

    @property
    def count(self) -> int:
        """Slots of the largest head."""
        return self.base + self.appended

    @property
    def held(self) -> Tensor:
        """Slots of every row and head, int64 ``[batch, heads]``."""
        if self.sizes is None:
            return torch.full((self.batch, self.heads), self.count)
        return self.sizes + self.appended

    @property
    def slots(self) -> Slots:
        """All slots, as ``Page.slots``, in the dtype they came in."""
        return self.read()

    def read(self, exactly: bool = False) -> Slots:
        """As ``slots``. ``exactly``: in float32 at least, which gives back what is stored without
        rounding it to the model's dtype."""
        slots = self._first(exactly)
        return slots if self.sizes is None else to_the_end(slots, self.held)

    def _first(self, exactly: bool = False) -> Slots:
        """All slots; of every head its own first."""
        dtype = compute_dtype(self._dtype) if exactly else self._dtype
        total = self.base + self.appended
        fields = {name: self._column(name, total) for name in self._columns}
        for name in _PACKED:
            exact = self._exact[name]
            shape = (self.batch, self.heads, total, exact.shape[-1])
            if self.sizes is None:
                fields[name] = out = exact.new_empty(shape, dtype=dtype)
                first = self._kept - int(self._parts[2, 0, 0])
                out[:, :, :first] = exact[:, :, :first]
                if self._hidden:
                    self._packed[name].read(out[:, :, first : first + self._hidden])
                end = self._kept + self.appended
                out[:, :, first + self._hidden :] = exact[:, :, first:end]
                continue
            fields[name] = out = exact.new_zeros(shape, dtype=dtype)
            if self._hidden:
                middle = out.new_empty((*shape[:2], self._hidden, shape[3]))
                self._unflat(self._packed[name]).read(middle)
                _put(out, self._middle_at(), middle, self.base)
            _put(out, self._exact_at(), exact[:, :, : self._kept].to(dtype), self.base)
            new = exact[:, :, self._kept : self._kept + self.appended].to(dtype)
            _put(out, self._behind(), new, -1)
        if "mass" in fields:
            mass = fields["mass"]
            weight = torch.where(mass != 0, mass, 1.0).unsqueeze(-1)
            fields["values"] = fields["values"].to(compute_dtype(dtype)) * weight
        return Slots(**fields)

    def _behind(self) -> Tensor:
        """Where the appended slots of a head lie among its slots, ``[batch, heads, appended]``."""
        start = self.held.to(self._parts.device).unsqueeze(-1) - self.appended
        return start + torch.arange(self.appended, device=start.device)

    def _column(self, name: str, total: int) -> Tensor:
        """Mass, positions or score of every head's slots, the appended ones behind its others."""
        buffer = self._columns[name][:, :, :total]
        if self.sizes is None or not self.appended:
            return buffer
        out = buffer.clone()
        out[:, :, self.base :] = 0
        return out.scatter_(2, self._behind(), buffer[:, :, self.base :])

    def open(self) -> Page:
        """The dequantised page, for attention to read."""
        if self._opened is None:
            sizes = None if self.sizes is None else self.held.to(self._parts.device)
            self._opened = Page(self._first(), sizes)
        return self._opened

    def release(self) -> None:
        """The attention over the page is done."""
        self._opened = None

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]``, as given, behind every head's slots."""
        if new.mass is not None and "mass" not in self._columns:
            shape = (self.batch, self.heads, self.base + self.appended + self.room)
            self._columns["mass"] = new.mass.new_ones(shape)
        q, start = new.count, self._kept + self.appended
        for name, buffer in self._exact.items():
            buffer[:, :, start : start + q] = getattr(new, name)
        start = self.base + self.appended
        for name, buffer in self._columns.items():
            tensor = getattr(new, name)
            empty = 1.0 if name == "mass" else 0.0
            buffer[:, :, start : start + q] = empty if tensor is None else tensor
        self.appended += q
        self.room -= q
        self._opened = None

    def drop(self, tokens: int) -> None:
        """Forget the last ``tokens`` slots of every head, which were appended."""
        self.appended -= tokens
        self.room += tokens
        self._opened = None

    def mark_last(self, live: Tensor) -> None:
        """Say which of the last tokens, just appended, are real: bool ``[batch, q]``."""
        q = live.shape[1]
        if "mass" not in self._columns:
            shape = (self.batch, self.heads, self.base + self.appended + self.room)
            dtype = compute_dtype(self._dtype)
            self._columns["mass"] = torch.ones(shape, dtype=dtype, device=live.device)
        rows, end = live.unsqueeze(1), self.base + self.appended
        self._columns["mass"][:, :, end - q : end] *= rows
        end = self._kept + self.appended
        self._exact["values"][:, :, end - q : end] *= rows.unsqueeze(-1)
        self._opened = None

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots, ``[batch, heads, count]``."""
        total = self.base + self.appended
        if "score" not in self._columns:
            self._columns["score"] = score.new_zeros(*score.shape[:2], total + self.room)
        if self.sizes is not None:
            new = score[:, :, total - self.appended :]
            before = (total - self.held).to(score.device).unsqueeze(-1)
            index = torch.arange(self.base, device=score.device) + before
            score = torch.cat([score.gather(2, index.clamp(max=total - 1)), new], dim=2)
        self._columns["score"][:, :, :total] = score
        self._opened = None

    def grown(self, room: int) -> QuantizedPage:
        """The same slots with ``room`` for more."""
        twin = copy.copy(self)
        twin.release()
        used = {"_exact": self._kept + self.appended, "_columns": self.base + self.appended}
        for name, count in used.items():
            held = getattr(self, name)
            setattr(twin, name, {n: _padded(t[:, :, :count], room) for n, t in held.items()})
        twin.room = room
        return twin

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to everything held."""
        twin = copy.copy(self)
        twin.release()
        for name in ("_exact", "_columns"):
            setattr(twin, name, {n: owned(fn(t)) for n, t in getattr(self, name).items()})
        twin._packed = {n: part.map(lambda t: owned(fn(t))) for n, part in self._packed.items()}
        twin._parts = torch.stack([fn(part) for part in self._parts])
        twin.batch = twin._parts.shape[1]
        if self.sizes is not None:
            twin.sizes = fn(self.sizes)
        if self._ragged is not None:
            ragged = self._ragged
            twin._ragged = Ragged(fn(ragged.start), fn(ragged.sizes), ragged.total)
        return twin

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte counting."""
        held = [*self._exact.values(), *self._columns.values()]
        for part in self._packed.values():
            held += part.tensors()
        return held if self._opened is None else [*held, *self._opened.tensors()]


def _taken(tensor: Tensor, index: Tensor, room: int) -> Tensor:
    """Slots by their number, ``[batch, heads, k + room, ...]``; a number beyond the end: any."""
    index = index.clamp(max=tensor.shape[2] - 1).unsqueeze(-1)
    taken = tensor.gather(2, index.expand(-1, -1, -1, tensor.shape[3]))
    return _padded(taken, room)


def _padded(tensor: Tensor, room: int) -> Tensor:
    if not room:
        return tensor.contiguous()
    shape = (*tensor.shape[:2], tensor.shape[2] + room, *tensor.shape[3:])
    buffer = tensor.new_zeros(shape)
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


def _put(out: Tensor, index: Tensor, rows: Tensor, nowhere: int) -> None:
    """Add rows to their places in ``out``, which is 0 there, but those with place ``nowhere``."""
    if not index.shape[2]:
        return
    there = (index != nowhere).unsqueeze(-1)
    index = torch.where(index == nowhere, 0, index).unsqueeze(-1)
    out.scatter_add_(2, index.expand_as(rows), rows * there)
