"""Read-only slots of a layer, with heads of any size: in 8 or 4 bits, or unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.fields import read_columns
from kvsketch.cache.kind import Kind
from kvsketch.cache.quantized import Quantized, quantize
from kvsketch.cache.ragged import Blocks, Ragged, flatten, unflatten
from kvsketch.cache.storage import FULL, Bits
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State


class Middle:
    """Keys and mean values u / m (u where m = 0) in 8 or 4 bits; masses, positions and scores
    unchanged. A value of 0 stays exactly 0, so that a changed weight of a slot does not affect its
    value here.

    Tensors have the layout of a ``Page`` without room: ``[batch, heads, slots, ...]``, or ``[batch,
    total, ...]`` where heads differ in size.

    Args:
        slots: ``[batch, heads, n, ...]``, of every head its own slots first. Slots read from
            ``previous`` in float32 get the same codes again.
        sizes: how many slots each head has, int64 ``[batch, heads]``, all <= n.
        bits: of keys and of values, 8 or 4; or 16 of both: in the dtype of the keys.
        previous: the source of centres and units.

    Attributes:
        appended, room: 0, as nothing can be appended.
        sizes: as given.
        count: slots of the largest head.
        packed: keys and values in 8 or 4 bits.
        fields: mass, positions, score, if present; keys and mean values as they are.
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
        given = {**slots.tensors(), "values": means.to(slots.keys.dtype)}
        self.packed: dict[str, Quantized] = {}
        few = () if bits == FULL else (("keys", slots.keys), ("values", means))
        for name, tensor in few:
            part = quantize(
                tensor,
                bits.keys if name == "keys" else bits.values,
                per_channel=name == "keys",
                live=None if bool(live.all()) else live,
                previous=None if previous is None else previous.packed[name],
            )
            self.packed[name] = part.map_slots(self._laid)
        self.fields = {
            name: self._laid(tensor) for name, tensor in given.items() if name not in self.packed
        }

    @classmethod
    def hollow(cls, one: Slots, sizes: Tensor, bits: Bits) -> Middle:
        """A layout without slots: its contents are views of a single slot, which take no memory and
        define the shapes and dtypes for ``of``.

        Args:
            one: a slot of every head, ``[1, heads, 1, ...]``.
            sizes, bits: as for the class.
        """
        made = cls(one, torch.ones_like(sizes[:1], device=one.keys.device), bits)
        made.batch, made.sizes, made.count = len(sizes), sizes, int(sizes.max())
        even = bool((sizes == made.count).all())
        made.blocks = None if even else Blocks(sizes)

        def spread(tensor: Tensor) -> Tensor:
            if made.blocks is None:
                return tensor.expand(*tensor.shape[:2], made.count, *tensor.shape[3:])
            return tensor[:, 0].expand(1, made.blocks.layout.total, *tensor.shape[3:])

        made.fields = {name: spread(tensor) for name, tensor in made.fields.items()}
        made.packed = {
            name: replace(part.map_slots(spread), count=made.count)
            for name, part in made.packed.items()
        }
        return made

    def _laid(self, tensor: Tensor) -> Tensor:
        """From ``[batch, heads, n, ...]`` to the stored layout."""
        if self.blocks is None:
            return tensor.contiguous()
        layout = self.blocks.layout
        return flatten(tensor, *layout.places(self.count), layout.total)

    def _padded(self, tensor: Tensor) -> Tensor:
        """The inverse, with zeros after the slots of a head."""
        if self.blocks is None:
            return tensor
        shape = (self.batch, self.heads, self.count)
        return unflatten(tensor, *self.blocks.layout.places(self.count), shape)

    def read(self, dtype: torch.dtype) -> Slots:
        """The slots in a floating point dtype ``[batch, heads, n, ...]``, each head's own first,
        followed by undefined ones. Sums of values are at least float32."""
        fields = {name: self._padded(tensor) for name, tensor in self.fields.items()}
        for name, part in self.packed.items():
            padded = part.map_slots(self._padded)
            out = torch.empty(
                *padded.codes.shape[:3], part.dim, dtype=dtype, device=part.codes.device
            )
            padded.read(out)
            fields[name] = out
        fields |= {name: fields[name].to(dtype) for name in ("keys", "values")}
        weight = _weight(fields.get("mass"))
        if weight is not None:
            fields["values"] = fields["values"].to(compute_dtype(dtype)) * weight
        return Slots(**fields)

    @property
    def slots(self) -> Slots:
        """The slots in float32, dead ones after a head's own."""
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
        """With ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = copy.copy(self)
        twin.sizes = fn(self.sizes)
        twin.batch = twin.sizes.shape[0]
        twin.packed = {name: part.map(fn) for name, part in self.packed.items()}
        twin.fields = {name: fn(tensor) for name, tensor in self.fields.items()}
        if self.blocks is not None:
            layout = self.blocks.layout
            twin.blocks = self.blocks.moved(Ragged(fn(layout.start), twin.sizes, layout.total))
        return twin

    def to_state(self) -> State:
        """All slots, in their bits."""
        state, laid = State(values={"count": self.count}), _same
        if self.blocks is not None:
            state.put("layout", self.blocks.to_state(self.sizes))
            laid = self.blocks.layout.packed
        state.keep(sizes=self.sizes, **{name: laid(t) for name, t in self.fields.items()})
        for name, part in self.packed.items():
            state.put(name, part.map_slots(laid).to_state())
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind) -> Middle:
        """Restore the result of ``to_state``.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        middle = cls.__new__(cls)
        heads = middle.batch, middle.heads = kind.batch, kind.heads
        middle.count = reader.whole("count", 1)
        middle.sizes = reader.integers("sizes", heads, 0, middle.count)
        middle.blocks, laid = None, _same
        lead: tuple[int, ...] = (*heads, middle.count)
        if int(middle.sizes.max()) != middle.count:
            raise reader.wrong("count", middle.count, "the size of the largest head")
        if reader.has("layout"):
            layout = reader.part("layout")
            middle.blocks = Blocks.from_state(layout, middle.sizes, middle.sizes, 0)
            laid, lead = middle.blocks.layout.unpacked, (int(middle.sizes.sum()),)
        elif bool((middle.sizes != middle.count).any()):
            raise reader.wrong("count", middle.count, "the size of every head, without a layout")
        middle.packed = {}
        for name, dim in (("keys", kind.key_dim), ("values", kind.value_dim)):
            part = Quantized.from_state(reader.part(name), lead, heads, dim, name == "keys")
            if part.count != middle.count:
                raise reader.wrong(f"{name}.count", part.count, f"{middle.count}")
            middle.packed[name] = part.map_slots(laid)
        middle.fields = {name: laid(t) for name, t in read_columns(reader, lead).items()}
        reader.close()
        return middle

    def __deepcopy__(self, memo: dict[int, object]) -> Middle:
        """Shares the tensors, which are never written to: setting a score replaces its tensor."""
        twin = copy.copy(self)
        twin.packed, twin.fields = dict(self.packed), dict(self.fields)
        return twin

    def contents(self) -> list[Tensor]:
        """The tensors of slots, without those of the layout."""
        held = list(self.fields.values())
        for part in self.packed.values():
            held += part.tensors()
        return held

    def of(self, contents: Iterable[Tensor]) -> Middle:
        """The same layout with other ``contents``, in that order and of those shapes and dtypes."""
        twin, rest = copy.copy(self), iter(contents)
        twin.fields = {name: next(rest) for name in self.fields}
        twin.packed = {name: part.of(rest) for name, part in self.packed.items()}
        return twin

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = self.contents()
        return held if self.blocks is None else [*held, *self.blocks.tensors()]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _weight(mass: Tensor | None) -> Tensor | None:
    """The divisor of sums of values."""
    return None if mass is None else torch.where(mass != 0, mass, 1.0).unsqueeze(-1)
