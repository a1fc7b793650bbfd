"""A part of a page: slots of one layer in flat tensors, exact or in few bits, of heads of any
size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsketch.page.fields import EMPTY, NEW, fields_of, owned, with_room
from kvsketch.page.quantized import FULL, Bits, Quantized, quantize
from kvsketch.page.ragged import Blocks, Ragged, flatten, unflatten
from kvsketch.slots import Slots, compute_dtype


class Part:
    """Slots of one layer, with a start, a count and room for every row and KV head.

    Flat tensors ``[batch, total, ...]`` hold them. Where heads are of equal size, they have the
    shape ``[batch, heads, capacity, ...]``; heads of different size (or of different size in
    different rows) lie one after the other. All heads get the same tokens appended, so that one
    number, ``appended``, is the growth of all of them.

    There are three kinds. Exact slots are extended in place, so that decoding allocates nothing.
    Slots in few bits are only read, except for their scores. The tokens of a
    context that is not compressed (``of_tokens``) grow by copies, as in transformers' own cache.

    Args:
        slots: ``[batch, heads, n, ...]``, of every head its own slots first, dead ones after them.
        sizes: how many slots each head has: int64 ``[batch, heads]``; None: all ``n``.
        room: slots that can be appended to every head.
        bits: of keys and of values; ``FULL``: they are exact.
        previous: in few bits, the part from which the slots were read in float32. Slots that have
            not changed keep their bits.
        dtype: of exact keys and values; None: that of the keys.

    Attributes:
        fields: exact keys and values (u / m), and log_mass, positions, score if present.
        packed: keys and values in few bits.
        sizes: int64 ``[batch, heads]``, without the appended ones; None: ``base`` in every head.
        base: slots of the largest head, without the appended ones.
        appended: slots appended to every head.
        room: slots that still can be.
        blocks: of heads of different size, before anything was appended; None: all have ``base +
            appended``.
        grows: whether it grows by copies.
        next_place: of heads of different size, the place of each one's next slot in the flattened
            tensors, int64 ``[batch * heads]``.
    """

    appended = room = 0
    grows = False
    blocks: Blocks | None = None
    sizes: Tensor | None = None
    next_place: Tensor
    _spans: tuple[Tensor, Tensor] | None = None
    _places: tuple[Tensor, Tensor] | None = None  # of all slots, while they are handled
    for_kernel: Any = None  # what a kernel keeps here, see kernels.cpu

    def __init__(
        self,
        slots: Slots,
        sizes: Tensor | None = None,
        room: int = 0,
        bits: Bits = FULL,
        previous: Part | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.batch, self.heads, self.base = slots.keys.shape[:3]
        self.room, self.sizes = room, sizes
        if sizes is not None:
            self.blocks = Blocks(sizes, room)
            self.next_place = self.blocks.layout.behind(sizes)
        fields = _needed(slots, sizes)
        self.packed: dict[str, Quantized] = {}
        lay = self._layer()
        if bits != FULL:
            live = _live(slots, sizes)
            for name, each in (("keys", bits.keys), ("values", bits.values)):
                few = quantize(
                    fields.pop(name),
                    each,
                    per_channel=name == "keys",
                    live=live,
                    previous=None if previous is None else previous.packed[name],
                )
                self.packed[name] = few.map_slots(lambda t: lay(t, ""))
        dtype = dtype or slots.keys.dtype
        fields = {n: t.to(dtype) if n in ("keys", "values") else t for n, t in fields.items()}
        self.fields = {name: lay(tensor, name) for name, tensor in fields.items()}

    @classmethod
    def over(
        cls,
        fields: dict[str, Tensor],
        packed: dict[str, Quantized],
        shape: tuple[int, int, int],
        sizes: Tensor | None = None,
        blocks: Blocks | None = None,
    ) -> Part:
        """A part over tensors that are there already.

        Args:
            fields, packed, sizes, blocks: as the attributes.
            shape: rows, KV heads, and slots of the largest head.
        """
        part = cls.__new__(cls)
        part.batch, part.heads, part.base = shape
        part.fields, part.packed, part.sizes, part.blocks = fields, packed, sizes, blocks
        return part

    @classmethod
    def of_tokens(cls, slots: Slots) -> Part:
        """Tokens that are not compressed: gradients go through, and nothing is ever written into
        their tensors."""
        batch, heads, count = slots.keys.shape[:3]
        fields = fields_of(slots)
        fields["values"] = fields["values"].to(slots.keys.dtype)
        part = cls.over(fields, {}, (batch, heads, count))
        part.grows = True
        return part

    def _layer(self) -> Callable[[Tensor, str], Tensor]:
        """From a field ``[batch, heads, n, ...]`` of this name to the stored layout."""
        if self.blocks is None:
            return lambda tensor, name: with_room(tensor, self.room, NEW.get(name))
        layout = self.blocks.layout
        places = layout.places(self.base)
        return lambda t, name: flatten(t, *places, layout.total, EMPTY.get(name, 0.0))

    @property
    def layout(self) -> Ragged | None:
        """Where the slots of heads of different size start; None: all are of the same size."""
        return None if self.blocks is None else self.blocks.layout

    def refilled(
        self, slots: Slots, sizes: Tensor | None, room: int, dtype: torch.dtype | None = None
    ) -> Part:
        """A part of other exact slots, in the same tensors if they fit: a page that is compressed
        repeatedly then stays at the same address, which a recorded CUDA graph needs. Arguments as
        for the class. This part must not be used afterwards."""
        fields = _needed(slots, sizes)
        if not self._fits(fields, sizes, room):
            return Part(slots, sizes, room, dtype=dtype)
        twin = copy.copy(self)
        twin.base, twin.appended, twin.room, twin.sizes = slots.count, 0, room, sizes
        if sizes is not None:
            assert self.blocks is not None
            layout = Ragged(self.blocks.layout.start, sizes, self.blocks.layout.total)
            twin.blocks = self.blocks.moved(layout)
            twin.next_place.copy_(layout.behind(sizes))
            places = layout.places(slots.count)
        for name, buffer in self.fields.items():
            tensor = fields[name]
            if tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                tensor = tensor.clone()  # a view of it: what is to come would be overwritten
            if sizes is not None:
                buffer.copy_(flatten(tensor, *places, layout.total, EMPTY.get(name, 0.0)))
                continue
            buffer[:, :, : tensor.shape[2]] = tensor
            if name in NEW:
                buffer[:, :, tensor.shape[2] :] = NEW[name]
        if twin._spans is not None:
            twin._spans[1].copy_(twin.held)
        twin._places = None
        return twin

    def _fits(self, fields: dict[str, Tensor], sizes: Tensor | None, room: int) -> bool:
        """Whether the tensors of this part can store the others."""
        if self.grows or self.packed or fields.keys() != self.fields.keys():
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
            return torch.full((self.batch, self.heads), self.count, device="cpu")
        return self.sizes + self.appended

    def even(self, name: str) -> Tensor:
        """A field of heads of equal size, ``[batch, heads, count, ...]``, as a view."""
        return self.fields[name][:, :, : self.count]

    @property
    def log_mass(self) -> Tensor | None:
        """Log masses of heads of equal size; None: all are 0."""
        return self.even("log_mass") if "log_mass" in self.fields else None

    def spans(self) -> tuple[Tensor, Tensor]:
        """Where each head's slots start in its row of the flat tensors, and how many they are,
        int64 ``[batch, heads]`` on the device of the part. The counts are a tensor that appending
        writes into, so that a recorded launch sees the new counts."""
        if self._spans is None:
            device = self.lead[1]
            if self.layout is None:
                start = torch.arange(self.heads, device=device) * self.lead[0][2]
                start = start.expand(self.batch, -1).contiguous()
            else:
                start = self.layout.start
            self._spans = start, self.held.to(device).contiguous()
        return self._spans

    @property
    def lead(self) -> tuple[torch.Size, torch.device]:
        """The axes of the fields before the channels, and their device."""
        keys = self.packed["keys"].codes if self.packed else self.fields["keys"]
        return keys.shape[:-1], keys.device

    @property
    def slots(self) -> Slots:
        """As ``read``."""
        return self.read()

    def read(self, dtype: torch.dtype | None = None) -> Slots:
        """All slots ``[batch, heads, count, ...]``; a smaller head's are the last ones, after dead
        ones, so that the newest tokens of all heads are aligned. Value-sums are at least float32,
        so that u / m is exact when they are stored again.

        Args:
            dtype: of keys and values; None: as they are, float32 if they are in few bits.
        """
        fields = self.of_heads()
        for name, few in self.packed.items():
            padded = few.map_slots(lambda t: self._padded(t, ""))
            shape = (*padded.codes.shape[:3], few.dim)
            out = torch.empty(shape, dtype=dtype or torch.float32, device=few.codes.device)
            padded.read(out)
            fields[name] = out
        if dtype is not None:
            fields |= {name: fields[name].to(dtype) for name in ("keys", "values")}
        if "log_mass" in fields:
            mass, values = fields.pop("log_mass").exp(), fields["values"]
            if dtype is not None:
                mass = mass.to(compute_dtype(dtype))
            fields["mass"] = mass
            fields["values"] = values.to(compute_dtype(values.dtype)) * mass.unsqueeze(-1)
        return Slots(**fields)

    @property
    def keys_alone(self) -> Slots:
        """``slots`` with values of no columns, for a method that scores exact keys."""
        fields = self.of_heads(but="values")
        if "log_mass" in fields:
            fields["mass"] = fields.pop("log_mass").exp()
        return Slots(**fields, values=fields["keys"][..., :0])

    def of_heads(self, but: str = "") -> dict[str, Tensor]:
        """The fields ``[batch, heads, count, ...]`` as they are stored, in the order of ``slots``,
        except one."""
        fields = {name: tensor for name, tensor in self.fields.items() if name != but}
        if self.layout is not None and "log_mass" not in fields:
            fields["log_mass"] = self.filled("log_mass")
        return {name: self._padded(tensor, name) for name, tensor in fields.items()}

    def _padded(self, tensor: Tensor, name: str) -> Tensor:
        """A field ``[batch, heads, count, ...]``, with smaller heads' slots last."""
        if self.layout is None:
            return tensor[:, :, : self.count]
        shape = (self.batch, self.heads, self.count)
        return unflatten(tensor, *self._now_at(), shape, EMPTY.get(name, 0.0))

    def last(self, tokens: int) -> dict[str, Tensor]:
        """The fields of the last slots of every head, ``[batch, heads, tokens, ...]``."""
        if self.layout is None:
            first = self.count - tokens
            return {n: buffer[:, :, first : self.count] for n, buffer in self.fields.items()}
        shape = (self.batch, self.heads, tokens)
        index = self.next_place.unsqueeze(-1) + torch.arange(
            -tokens, 0, device=self.next_place.device
        )
        return {
            n: buffer.view(-1, *buffer.shape[2:])[index].view(*shape, *buffer.shape[2:])
            for n, buffer in self.fields.items()
        }

    def append(self, new: Slots) -> None:
        """Write ``new`` ``[batch, heads, q, ...]`` behind every head's slots; q <= ``room``, unless
        it ``grows``."""
        if new.mass is not None and "log_mass" not in self.fields:
            self.fields["log_mass"] = self.filled("log_mass")
        given, q = fields_of(new), new.count
        if self.grows:
            for name, before in self.fields.items():
                tensor = given.get(name)
                if tensor is None:
                    tensor = before.new_full((*before.shape[:2], q), NEW.get(name, 0.0))
                self.fields[name] = torch.cat([before, tensor.to(before.dtype)], dim=2)
            self.base += q
            return
        for name, buffer in self.fields.items():
            tensor = given.get(name)
            if self.layout is None:
                target = buffer[:, :, self.count : self.count + q]
                if tensor is not None:
                    target.copy_(tensor)
                elif name not in NEW:
                    target.zero_()
                continue  # what the others are is there already
            flat = buffer.view(-1, *buffer.shape[2:])
            index = self.next_place
            if q > 1:
                index = (index.unsqueeze(-1) + torch.arange(q, device=index.device)).flatten()
            if tensor is not None:
                rows = tensor.reshape(-1, *tensor.shape[3:])
                flat.index_copy_(0, index, rows.to(buffer.dtype))
            elif name != "score":  # which is 0 already
                flat.index_fill_(0, index, NEW.get(name, 0.0))
        self._advance(q)

    def put(self, keys: Tensor, values: Tensor) -> None:
        """``append`` one token without positions, ``[batch, heads, 1, dim]``, to exact slots with
        room."""
        if self.layout is not None:
            self.append(Slots(keys, values))
            return
        self.fields["keys"].narrow(2, self.count, 1).copy_(keys)
        self.fields["values"].narrow(2, self.count, 1).copy_(values)
        self._advance(1)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` slots of every head, which were appended, or all that there
        are of a part that ``grows``."""
        if self.grows:
            self.base = max(0, self.base - tokens)
            self.fields = {name: t[:, :, : self.base] for name, t in self.fields.items()}
            return
        self._advance(-tokens)
        for name in NEW:
            buffer = self.fields.get(name)
            if buffer is None or not tokens:
                continue
            if self.layout is None:
                buffer[:, :, self.count : self.count + tokens] = NEW[name]
            else:  # no slot, until one is appended
                behind = self.next_place.unsqueeze(-1) + torch.arange(tokens, device=buffer.device)
                buffer.view(-1).index_fill_(0, behind.flatten(), EMPTY.get(name, 0.0))

    def _advance(self, tokens: int) -> None:
        self.appended += tokens
        self.room -= tokens
        self._places = None
        if self.layout is not None:
            self.next_place += tokens
        if self._spans is not None:
            self._spans[1].add_(tokens)

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the last tokens are real: bool ``[batch, q]``. The others are dead; keys
        and values stay, which a model's own kernel may read."""
        self._fill_missing("log_mass")
        q, column = live.shape[1], self.fields["log_mass"]
        rows = torch.zeros_like(live, dtype=column.dtype).masked_fill_(~live, EMPTY["log_mass"])
        rows = rows.unsqueeze(1).expand(-1, self.heads, -1)
        if self.layout is None:
            column[:, :, self.count - q : self.count] = rows
            return
        index = self.next_place.unsqueeze(-1) + torch.arange(-q, 0, device=column.device)
        column.view(-1).index_copy_(0, index.flatten(), rows.flatten())

    def own_score(self) -> None:
        """Have scores that may be written into: 0 unless there are any."""
        self._fill_missing("score")

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all slots, ``[batch, heads, count]``, ordered as ``slots``."""
        self._fill_missing("score")
        if self.layout is None:
            self.fields["score"][:, :, : self.count] = score
            return
        padded, flat = self._now_at()
        self.fields["score"].view(-1)[flat] = score.reshape(-1)[padded].to(
            self.fields["score"].dtype
        )

    def _fill_missing(self, name: str) -> None:
        """Make a field that can be written into."""
        if name not in self.fields:
            self.fields[name] = self.filled(name)
        elif self.grows:
            self.fields[name] = self.fields[name].clone()

    def _now_at(self) -> tuple[Tensor, Tensor]:
        """Places of all slots in ``slots`` and in the flat tensors."""
        assert self.layout is not None
        if self._places is None:
            grown = Ragged(self.layout.start, self.held, self.layout.total)
            self._places = grown.places(self.count, last=True)
        return self._places

    def filled(self, name: str) -> Tensor:
        """A field as it is before anything was said of it."""
        shape, device = self.lead
        dtype = torch.float32 if self.packed else compute_dtype(self.fields["values"].dtype)
        if self.blocks is not None and name in EMPTY:
            live = self.blocks.live(self.appended)
            column = torch.full_like(live, NEW[name], dtype=dtype)
            return column.masked_fill_(~live, EMPTY[name]).view(shape)
        return torch.full(shape, NEW[name], dtype=dtype, device=device)

    def grown(self, room: int) -> Part:
        """The same slots with ``room`` for more."""
        if self.layout is None:
            twin = copy.copy(self)
            twin._spans = twin._places = None
            twin.base, twin.appended, twin.room = self.count, 0, room
            twin.fields = {
                name: with_room(buffer[:, :, : self.count], room, NEW.get(name))
                for name, buffer in self.fields.items()
            }
            return twin
        slots, before = self.slots, self.count - self.held
        index = torch.arange(self.count, device=before.device) + before.unsqueeze(-1)
        first = slots.take(index.clamp(max=self.count - 1))
        return Part(first, self.held, room)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Part:
        """The part with ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = copy.copy(self)
        twin._spans = twin._places = None

        def own(tensor: Tensor) -> Tensor:
            return fn(tensor) if self.grows else owned(fn(tensor))

        twin.fields = {name: own(tensor) for name, tensor in self.fields.items()}
        twin.packed = {name: few.map(own) for name, few in self.packed.items()}
        twin.batch = twin.lead[0][0]
        if self.sizes is not None:
            twin.sizes = fn(self.sizes)
        if self.blocks is not None:
            assert twin.sizes is not None
            layout = Ragged(fn(self.blocks.layout.start), twin.sizes, self.blocks.layout.total)
            twin.blocks = self.blocks.moved(layout)
            twin.next_place = layout.behind(twin.held)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which a kernel has to describe anew."""
        return {**self.__dict__, "for_kernel": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Part:
        """Shares the tensors that are never written into: in few bits, all but the scores."""
        twin = copy.copy(self)
        twin._spans = twin._places = None
        twin.packed = dict(self.packed)
        own = set() if self.grows else {"score"} if self.packed else set(self.fields)
        twin.fields = {n: t.clone() if n in own else t for n, t in self.fields.items()}
        if self.blocks is not None and not self.packed:
            twin.next_place = self.next_place.clone()
        return twin

    def contents(self) -> list[Tensor]:
        """The tensors of slots, without those of the layout."""
        held = list(self.fields.values())
        for few in self.packed.values():
            held += few.tensors()
        return held

    def release(self, lookups: bool = False) -> None:
        """The attention over the part is computed; release its temporary tensors, and with
        ``lookups`` what torch's kernels keep for the next one."""
        self._places = None
        if lookups and self.blocks is not None:
            self.blocks.forget()

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = self.contents()
        if self.blocks is None:
            return held
        return [*held, *([] if self.packed else [self.next_place]), *self.blocks.tensors()]


def _needed(slots: Slots, sizes: Tensor | None) -> dict[str, Tensor]:
    """The fields of slots, without log masses that say no more than the sizes do."""
    fields = {name: tensor.detach() for name, tensor in fields_of(slots).items()}
    if slots.mass is not None:
        says = slots.mass != 1
        if sizes is not None:
            says &= torch.arange(slots.count, device=sizes.device) < sizes.unsqueeze(-1)
        if not bool(says.any()):
            del fields["log_mass"]
    return fields


def _live(slots: Slots, sizes: Tensor | None) -> Tensor | None:
    """Which of a head's own slots are not dead, bool ``[batch, heads, n]``; None: all."""
    live = slots.live()
    if sizes is not None:
        there = torch.arange(slots.count, device=sizes.device) < sizes.unsqueeze(-1)
        live = there if live is None else there & live
    return live
