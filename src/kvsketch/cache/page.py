"""The page of a layer: its slots in one flat tensor, with heads of any size, extended in place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from kvsketch.cache.fields import owned, read_fields, stored, with_room
from kvsketch.cache.kind import Kind
from kvsketch.cache.ragged import Blocks, Ragged, flatten, unflatten
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State

# Default values of a new slot's fields, which are written before the slot is appended.
_NEW = {"mass": 1.0, "score": 0.0}


class Page:
    """Slots of one layer, with a start, a count and room for every row and KV head.

    Flat tensors ``[batch, total, ...]`` hold them: of heads of equal size ``total`` is heads times
    capacity, so that they are ``[batch, heads, capacity, ...]`` by a view; heads of different size
    (or of different size in different rows) lie one after the other. All heads get the same tokens
    appended, so that one number, ``appended``, is the growth of all of them.

    Where there are masses, values are stored as u / m (u where m = 0): rounding to 16 bits then has
    the same relative error for a slot of a thousand tokens as for one, and any kernel can use log m
    as a bias.

    Args:
        slots: ``[batch, heads, n, ...]``, of every head its own slots first, dead ones after them.
            Values with masses may have more bits than keys; they are stored in the keys' dtype.
        sizes: how many slots each head has: int64 ``[batch, heads]``; None: all ``n``.
        room: slots that can be appended to every head.

    Attributes:
        fields: keys, values (u / m), and mass, positions, score if present.
        sizes: int64 ``[batch, heads]``, without the appended ones; None: ``base`` in every head.
        base: slots of the largest head, without the appended ones.
        appended: slots appended to every head.
        room: slots that still can be.
        blocks: of heads of different size, before anything was appended; None: all have ``base +
            appended``.
    """

    def __init__(
        self,
        slots: Slots,
        sizes: Tensor | None = None,
        room: int = 0,
    ) -> None:
        self.batch, self.heads, self.base = slots.keys.shape[:3]
        self.appended, self.room, self.sizes = 0, room, sizes
        self.blocks: Blocks | None = None
        self._spans: tuple[Tensor, Tensor] | None = None
        self._places: tuple[Tensor, Tensor] | None = None  # of all slots, while they are handled
        fields = stored(slots, sizes)
        if sizes is None:
            self.fields = {n: with_room(t, room, _NEW.get(n)) for n, t in fields.items()}
        else:
            self._lay(fields, sizes)

    def _lay(self, fields: dict[str, Tensor], sizes: Tensor) -> None:
        """Heads of different size, one after the other."""
        self.blocks = Blocks(sizes, self.room)
        layout = self.blocks.layout
        places = layout.places(self.base)
        self.fields = {n: flatten(t, *places, layout.total) for n, t in fields.items()}
        self._next = layout.behind(sizes)

    @property
    def layout(self) -> Ragged | None:
        """Where the slots of heads of different size start; None: all are of the same size."""
        return None if self.blocks is None else self.blocks.layout

    def refilled(self, slots: Slots, sizes: Tensor | None, room: int) -> Page:
        """A page of other slots, in the same tensors if they fit: a page that is compressed
        repeatedly then stays at the same address, which a recorded CUDA graph needs. Arguments as
        for the class. This page must not be used afterwards."""
        fields = stored(slots, sizes)
        if not self._fits(fields, sizes, room):
            return Page(slots, sizes, room)
        twin = copy.copy(self)
        twin.base, twin.appended, twin.room, twin.sizes = slots.count, 0, room, sizes
        if sizes is not None:
            assert self.blocks is not None
            start, total = self.blocks.layout.start, self.blocks.layout.total
            layout = Ragged(start, sizes, total)
            twin.blocks = self.blocks.moved(layout)
            twin._next.copy_(layout.behind(sizes))
            places = layout.places(slots.count)
        for name, buffer in self.fields.items():
            tensor = fields[name]
            if tensor.untyped_storage().nbytes() == buffer.untyped_storage().nbytes():
                tensor = tensor.clone()  # a view of it? what is to come would be overwritten
            if sizes is not None:
                buffer.copy_(flatten(tensor, *places, layout.total))
                continue
            buffer[:, :, : tensor.shape[2]] = tensor
            if name in _NEW:
                buffer[:, :, tensor.shape[2] :] = _NEW[name]
        if twin._spans is not None:
            twin._spans[1].copy_(twin.held)
        twin._places = None
        return twin

    def _fits(self, fields: dict[str, Tensor], sizes: Tensor | None, room: int) -> bool:
        """Whether the tensors of this page can store the others."""
        if fields.keys() != self.fields.keys():
            return False
        keys, buffer = fields["keys"], self.fields["keys"]
        if (self.batch, self.heads) != keys.shape[:2] or keys.dtype != buffer.dtype:
            return False
        if sizes is None or self.blocks is None:
            same = sizes is None and self.blocks is None
            return same and keys.shape[2] + room == buffer.shape[2]
        layout, other = self.blocks.layout, Ragged.of(sizes, room, self.blocks.size)
        return other.total == layout.total and torch.equal(other.start, layout.start)

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

    def even(self, name: str) -> Tensor:
        """A field of heads of equal size, ``[batch, heads, count, ...]``, as a view."""
        return self.fields[name][:, :, : self.base + self.appended]

    @property
    def even_mass(self) -> Tensor | None:
        """Masses of heads of equal size; None: all are 1."""
        return self.even("mass") if "mass" in self.fields else None

    def spans(self) -> tuple[Tensor, Tensor]:
        """Where each head's slots start in its row of the flat tensors, and how many they are,
        int64 ``[batch, heads]`` on the device of the page. The counts are a tensor that appending
        writes into, so that a recorded launch sees the new counts."""
        if self._spans is None:
            device = self.fields["keys"].device
            if self.layout is None:
                capacity = self.fields["keys"].shape[2]
                start = torch.arange(self.heads, device=device) * capacity
                start = start.expand(self.batch, -1).contiguous()
            else:
                start = self.layout.start
            self._spans = start, self.held.to(device).contiguous()
        return self._spans

    @property
    def slots(self) -> Slots:
        """All slots ``[batch, heads, count, ...]``; a smaller head's are the last ones, after dead
        ones, so that the newest tokens of all heads are aligned. Values with masses are at least
        float32, so that u / m is exact when they are stored again."""
        fields = self._of_heads(self.fields)
        if "mass" in fields:
            mass, values = fields["mass"], fields["values"]
            weight = torch.where(mass != 0, mass, 1.0).unsqueeze(-1)
            fields["values"] = values.to(compute_dtype(values.dtype)) * weight
        return Slots(**fields)

    @property
    def keys_alone(self) -> Slots:
        """``slots`` with values of no columns, for a method that scores keys."""
        fields = {n: t for n, t in self.fields.items() if n != "values"}
        found = self._of_heads(fields)
        return Slots(**found, values=found["keys"][..., :0])

    def _of_heads(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.layout is None:
            return {n: buffer[:, :, : self.count] for n, buffer in fields.items()}
        places, shape = self._now_at(), (self.batch, self.heads, self.count)
        if "mass" not in fields:
            fields = {**fields, "mass": self._filled("mass")}
        return {n: unflatten(t, *places, shape) for n, t in fields.items()}

    def last(self, tokens: int) -> dict[str, Tensor]:
        """The fields of the last slots of every head, ``[batch, heads, tokens, ...]``."""
        if self.layout is None:
            first = self.count - tokens
            return {n: buffer[:, :, first : self.count] for n, buffer in self.fields.items()}
        shape = (self.batch, self.heads, tokens)
        index = self._next.unsqueeze(-1) + torch.arange(-tokens, 0, device=self._next.device)
        return {
            n: buffer.view(-1, *buffer.shape[2:])[index].view(*shape, *buffer.shape[2:])
            for n, buffer in self.fields.items()
        }

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]`` behind every head's slots; q <= ``room``."""
        if new.mass is not None and "mass" not in self.fields:
            self.fields["mass"] = self._filled("mass")
        q = new.keys.shape[2]
        for name, buffer in self.fields.items():
            tensor: Tensor | None = getattr(new, name)
            if self.layout is None:
                start = self.base + self.appended
                target = buffer[:, :, start : start + q]
                if tensor is not None:
                    target.copy_(tensor)
                elif name not in _NEW:
                    target.zero_()
                continue  # what the others are is there already
            flat = buffer.view(-1, *buffer.shape[2:])
            index = self._next
            if q > 1:
                index = (index.unsqueeze(-1) + torch.arange(q, device=index.device)).flatten()
            if tensor is not None:
                rows = tensor.reshape(-1, *tensor.shape[3:])
                flat.index_copy_(0, index, rows.to(buffer.dtype))
            elif name != "score":  # which is 0 already
                flat.index_fill_(0, index, _NEW.get(name, 0.0))
        self._advance(q)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` slots of every head, which were appended."""
        self._advance(-tokens)
        for name in _NEW:
            buffer = self.fields.get(name)
            if buffer is None or not tokens:
                continue
            if self.layout is None:
                buffer[:, :, self.count : self.count + tokens] = _NEW[name]
            else:  # no slot, until one is appended
                behind = self._next.unsqueeze(-1) + torch.arange(tokens, device=buffer.device)
                buffer.view(-1).index_fill_(0, behind.flatten(), 0.0)

    def _advance(self, tokens: int) -> None:
        self.appended += tokens
        self.room -= tokens
        self._places = None
        if self.layout is not None:
            self._next += tokens
        if self._spans is not None:
            self._spans[1].add_(tokens)

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the last tokens, just appended, are real: bool ``[batch, q]``."""
        if "mass" not in self.fields:
            self.fields["mass"] = self._filled("mass")
        q, mass = live.shape[1], self.fields["mass"]
        rows = live.unsqueeze(1).expand(-1, self.heads, -1)
        if self.layout is None:
            mass[:, :, self.count - q : self.count] *= rows
            self.fields["values"][:, :, self.count - q : self.count] *= rows.unsqueeze(-1)
            return
        index = self._next.unsqueeze(-1) + torch.arange(-q, 0, device=mass.device)
        index = index.flatten()
        values = self.fields["values"].view(-1, self.fields["values"].shape[-1])
        keep = rows.reshape(-1)
        mass.view(-1)[index] *= keep
        values[index] *= keep.unsqueeze(-1)

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots, ``[batch, heads, count]``."""
        if "score" not in self.fields:
            self.fields["score"] = self._filled("score")
        if self.layout is None:
            self.fields["score"][:, :, : self.count] = score
            return
        padded, flat = self._now_at()
        self.fields["score"].view(-1)[flat] = score.reshape(-1)[padded]

    def _now_at(self) -> tuple[Tensor, Tensor]:
        """Places of all slots in ``slots`` and in the flat tensors."""
        assert self.layout is not None
        if self._places is None:
            grown = Ragged(self.layout.start, self.held, self.layout.total)
            self._places = grown.places(self.count, last=True)
        return self._places

    def _filled(self, name: str) -> Tensor:
        keys = self.fields["keys"]
        shape, dtype = keys.shape[:-1], compute_dtype(self.fields["values"].dtype)
        value = 1.0 if name == "mass" else 0.0
        if name == "mass" and self.blocks is not None:
            return self.blocks.live(self.appended).to(dtype).view(shape)
        return torch.full(shape, value, dtype=dtype, device=keys.device)

    def grown(self, room: int) -> Page:
        """The same slots with ``room`` for more."""
        if self.layout is None:
            twin = copy.copy(self)
            twin._spans = twin._places = None
            twin.base, twin.appended, twin.room = self.count, 0, room
            twin.fields = {
                name: with_room(buffer[:, :, : self.count], room, _NEW.get(name))
                for name, buffer in self.fields.items()
            }
            return twin
        slots, before = self.slots, self.count - self.held
        index = torch.arange(self.count, device=before.device) + before.unsqueeze(-1)
        first = slots.take(index.clamp(max=self.count - 1))
        return Page(first, self.held, room)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Page:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = copy.copy(self)
        twin._spans = twin._places = None
        twin.fields = {name: owned(fn(tensor)) for name, tensor in self.fields.items()}
        twin.batch = twin.fields["keys"].shape[0]
        if self.blocks is not None:
            assert self.sizes is not None
            twin.sizes = fn(self.sizes)
            layout = Ragged(fn(self.blocks.layout.start), twin.sizes, self.blocks.layout.total)
            twin.blocks = self.blocks.moved(layout)
            twin._next = layout.behind(twin.held)
        return twin

    def to_state(self) -> State:
        """All slots, and the room after them: at most twice as much."""
        if self.blocks is not None:
            layout = Ragged(self.blocks.layout.start, self.held, self.blocks.layout.total)
            if layout.roomy and self.room:
                return self.grown(0).to_state()
        room = self.room if self.blocks is not None else min(self.room, 2 * self.count)
        state = State(values={"base": self.base, "appended": self.appended, "room": room})
        if self.blocks is None:
            state.keep(**{name: self.even(name) for name in self.fields})
        else:
            state.keep(sizes=self.sizes, **{n: layout.packed(t) for n, t in self.fields.items()})
            state.put("layout", self.blocks.to_state(self.held))
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind) -> Page:
        """Restore the result of ``to_state``.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        page = cls.__new__(cls)
        page.batch, page.heads = kind.batch, kind.heads
        page.sizes = page.blocks = page._spans = page._places = None
        page.base, page.appended = reader.whole("base"), reader.whole("appended")
        page.room = reader.whole("room")
        if not reader.has("layout"):
            fields = read_fields(reader, (kind.batch, kind.heads, page.count), kind)
            if page.room > 2 * page.count:
                raise reader.wrong("room", page.room, "at most twice the slots there are")
            page.fields = {n: with_room(t, page.room, _NEW.get(n)) for n, t in fields.items()}
        else:
            page.sizes = reader.integers("sizes", (kind.batch, kind.heads), 0, page.base)
            if page.base > 16 * int(page.sizes.max()) + 1024:
                raise reader.wrong("base", page.base, "about the size of the largest head")
            part, held = reader.part("layout"), page.held
            page.blocks = Blocks.from_state(part, page.sizes, held, page.room)
            layout = Ragged(page.blocks.layout.start, held, page.blocks.layout.total)
            fields = read_fields(reader, (int(held.sum()),), kind)
            page.fields = {name: layout.unpacked(tensor) for name, tensor in fields.items()}
            page._next = layout.behind(held)
        reader.close()
        return page

    def release(self) -> None:
        """The attention over the page is computed; release its temporary tensors."""
        self._places = None

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = list(self.fields.values())
        if self.blocks is None:
            return held
        return [*held, self._next, *self.blocks.tensors()]
