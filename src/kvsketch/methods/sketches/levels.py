"""The levels C^0..C^T of merge-and-reduce (BalanceKV Algorithm 3), for many streams at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsketch.methods import Halving
from kvsketch.methods.sketches.base import Sketch, lengthened
from kvsketch.random_numbers import derived
from kvsketch.slots import Slots

#: The slots of some streams by field, ``[rows, q, ...]``.
Flat = dict[str, Tensor]


class Levels:
    """The levels of R = batch x streams independent streams, kept in a sketch's ``state``.

    Level l has slots that represent 2^l tokens each. When level l of a stream has a whole batch of
    t slots, the batch is halved and the half moves to level l + 1 (lines 10-16). Half a batch takes
    t/2 places even if the halving kept fewer (the smaller side of a walk). The other places are
    dead slots, so that every stream keeps the paper's schedule. Streams may differ in length.

    Args:
        sketch: the sketch whose state, meta and random stream are used.
        prefix: of the names in them.
        halving: the method that halves a batch.
        batch_size: t, even.
        top: T, the level that is never halved. None: the number of levels is unlimited.
        careful: whether to copy before writing, because the halving may raise an error.
    """

    def __init__(
        self,
        sketch: Sketch,
        prefix: str,
        halving: Halving,
        batch_size: int,
        top: int | None,
        careful: bool,
    ) -> None:
        self.sketch, self.prefix = sketch, prefix
        self.halving, self.batch_size, self.top, self.careful = halving, batch_size, top, careful
        self._taken: Tensor | None = None  # random streams used for each stream of slots, ``[R]``

    @property
    def depth(self) -> int:
        """The number of levels in use."""
        return int(self.sketch.meta.get(f"{self.prefix}.depth", 0))

    def fill(self, level: int) -> Tensor:
        """The number of places in use in a level, int64 ``[batch, streams]``."""
        return self.sketch.state[f"{self.prefix}{level}.fill"]

    def held(self, level: int) -> Slots:
        """The slots of a level. Places beyond ``fill`` are undefined."""
        return self.sketch.get(f"{self.prefix}{level}")

    @property
    def failed(self) -> Tensor:
        """The number of halvings that failed, int64 ``[batch, streams]``."""
        return self.sketch.state[f"{self.prefix}.failed"]

    def start(self, example: Slots) -> None:
        """Make an empty level 0 with the shapes and dtypes of ``example``."""
        shape = example.keys.shape[:2]
        zero = torch.zeros(shape, dtype=torch.int64, device=example.keys.device)
        self.sketch.state[f"{self.prefix}.failed"] = zero
        self._open(0, example)

    def _open(self, level: int, example: Slots) -> None:
        blank = _with_mass(example).narrow(0, 0).map(torch.clone)
        self.sketch.put(f"{self.prefix}{level}", blank)
        shape = example.keys.shape[:2]
        zero = torch.zeros(shape, dtype=torch.int64, device=example.keys.device)
        self.sketch.state[f"{self.prefix}{level}.fill"] = zero
        self.sketch.meta[f"{self.prefix}.depth"] = level + 1

    def push(self, level: int, new: Slots, there: Tensor, keys: Tensor) -> None:
        """Append slots to a level of every stream, and halve batches when they are full.

        Args:
            new: ``[batch, streams, q, ...]``.
            there: bool ``[batch, streams, q]``, which of them exist for a stream.
            keys: keys of the random numbers, int64 ``[batch, streams]``, the same in all calls for
                one object.
        """
        order = there.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        left = there.sum(-1)
        width = int(left.max())
        if width == 0:
            return
        batch, streams = new.keys.shape[:2]
        packed = _with_mass(new.take(order[..., :width])).tensors()
        rows = (left.flatten() > 0).nonzero().squeeze(1)
        flat = {name: t.reshape(batch * streams, *t.shape[2:])[rows] for name, t in packed.items()}
        self._push(level, rows, flat, left.flatten()[rows], keys.flatten())

    def _push(self, level: int, rows: Tensor, new: Flat, left: Tensor, keys: Tensor) -> None:
        """``push`` for some of the R streams. Row i of ``new`` goes to stream ``rows[i]``."""
        done = torch.zeros_like(left)
        column = torch.arange(next(iter(new.values())).shape[1], device=rows.device)
        while True:
            fill = self.fill(level).flatten()
            room = self.batch_size - fill[rows] if level != self.top else left
            count = torch.minimum(room, left - done)
            self._reserve(level, int((fill[rows] + count).max()))
            offset = column - done.unsqueeze(1)
            moved = (offset >= 0) & (offset < count.unsqueeze(1))
            r, c = moved.nonzero(as_tuple=True)
            self._write(level, rows[r], (fill[rows].unsqueeze(1) + offset)[r, c], new, r, c)
            fill = fill.index_add(0, rows, count)
            done = done + count
            full = rows[fill[rows] == self.batch_size] if level != self.top else rows[:0]
            fill = fill.index_fill(0, full, 0)
            self.sketch.state[f"{self.prefix}{level}.fill"] = fill.view(self.fill(level).shape)
            if full.numel():
                self._halve(level, full, keys)
            if not bool((done < left).any()):
                return

    def _halve(self, level: int, rows: Tensor, keys: Tensor) -> None:
        """Halve the full batches of some streams and append the halves to the next level."""
        batch = self.held(level).narrow(0, self.batch_size)
        part = batch.map(lambda t: t.flatten(0, 1)[rows].unsqueeze(0))
        taken = torch.zeros_like(keys) if self._taken is None else self._taken
        half = self.halving.half(part, derived(keys[rows], taken[rows]).unsqueeze(0))
        self._taken = taken.index_add(0, rows, torch.ones_like(rows))
        failed = self.failed.flatten().index_add(0, rows, half.failed[0].long())
        self.sketch.state[f"{self.prefix}.failed"] = failed.view(self.failed.shape)
        if level + 1 == self.depth:
            self._open(level + 1, self.held(level))
        kept = {name: t[0] for name, t in _with_mass(half.of(part)).tensors().items()}
        everything = torch.full_like(rows, self.batch_size // 2)
        self._push(level + 1, rows, kept, everything, keys)

    def _reserve(self, level: int, places: int) -> None:
        held = self.held(level)
        if places <= held.count:
            if self.careful:
                self.sketch.put(f"{self.prefix}{level}", held.map(torch.clone))
            return
        # The size grows to a whole batch in at most two steps. Only the top level grows beyond.
        half = self.batch_size // 2
        places = -(-places // half) * half if level else min(self.batch_size, 2 * places)
        extra = places - held.count
        grown = held.map(lambda t: lengthened(t, extra))
        self.sketch.put(f"{self.prefix}{level}", grown)

    def _write(
        self, level: int, rows: Tensor, places: Tensor, new: Flat, r: Tensor, c: Tensor
    ) -> None:
        for name, tensor in self.held(level).tensors().items():
            target = rows * tensor.shape[2] + places
            tensor.flatten(0, 2)[target] = new[name][r, c]

    def erase(self, gone: Tensor) -> None:
        """Empty every level of some streams, bool ``[batch, streams]``."""
        for level in range(self.depth):
            name = f"{self.prefix}{level}.fill"
            self.sketch.state[name] = self.sketch.state[name].masked_fill(gone, 0)

    def absorb(self, other: Levels, keys: Tensor) -> None:
        """Push every level of other streams onto these. ``other`` stays unchanged, and ``keys`` is
        as for ``push``."""
        for level in range(other.depth):
            while level >= self.depth:
                self._open(self.depth, other.held(level))
            held, fill = other.held(level), other.fill(level)
            column = torch.arange(held.count, device=fill.device)
            self.push(level, held, column < fill.unsqueeze(-1), keys)
        name = f"{self.prefix}.failed"
        self.sketch.state[name] = self.sketch.state[name] + other.failed

    def map_streams(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 1 (the streams), to all tensors."""
        names = [n for n in self.sketch.state if n.startswith(self.prefix)]
        for name in names:
            self.sketch.state[name] = fn(self.sketch.state[name]).contiguous()

    def slots(self) -> Slots:
        """The slots of all levels, ``[batch, streams, slots, ...]``, those of level l with weight
        2^l."""
        parts = []
        for level in range(self.depth):
            used = int(self.fill(level).max())
            held = self.held(level).narrow(0, used)
            column = torch.arange(used, device=held.keys.device)
            weight = (column < self.fill(level).unsqueeze(-1)) * 2.0**level
            parts.append(held.scaled(weight))
        return Slots.cat(parts)


def _with_mass(slots: Slots) -> Slots:
    """The slots with explicit masses, so that dead slots can be distinguished from live ones."""
    if slots.mass is not None:
        return slots
    return Slots(slots.keys, slots.values, slots.masses(), slots.positions)
