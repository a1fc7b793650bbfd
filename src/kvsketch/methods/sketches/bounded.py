"""Merge-and-reduce within a number of slots: batches are halved only if room is needed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.methods.sketches.base import Sketch, lengthened, token_bytes
from kvsketch.random_numbers import derived, uniform
from kvsketch.slots import Slots

B = TypeVar("B", bound="Bounded")

#: The default number of tokens of a batch: the block of BalanceKV's experiments.
BATCH = 256
# The share of the slots that halving frees at a time. At least 1 - this share stays in use.
_FREED = 0.08
# The level of places without a slot.
_NOWHERE = 1 << 20


class Bounded(Sketch):
    """Base class of the merge-and-reduce sketches within a budget. Ours, after BalanceKV's
    Algorithm 3, in which the number of slots depends on the length of the stream.

    Every slot has a weight, the number of tokens that it represents. Slots of weights in
    [2^l, 2^(l+1)) form level l. If a token arrives when there are ``capacity`` slots, whole batches
    of ``batch_size`` slots are halved, in the lowest level that has one, oldest first, until about
    8% of the slots are free. If no level has a whole batch, the level with the most slots is one
    batch. If every level has one slot, one of the two lightest is kept, with probability in
    proportion to the weights. Streams of any length above ``capacity`` therefore use the slots, and
    the length need not be known beforehand. The weight of a batch is passed on to the slots kept of
    it, whichever side of a walk they are on, so that no mass is lost.

    As long as every batch is whole and the halving keeps half, the bound of Theorem 3.3 holds,
    because a level has no more halvings than if batches of the same size were halved at once.

    Args:
        capacity: the largest number of slots per KV head, >= 2.
        batch_size: t, an even number >= 2. None: an eighth of ``capacity``, at most 256.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range.
    """

    least_slots = 2
    #: The number of weights per slot.
    columns: ClassVar[int] = 1

    def __init__(self, capacity: int, batch_size: int | None = None, seed: int = 0) -> None:
        self.capacity = at_least("capacity", capacity, 2)
        self.batch_size = batch_size if batch_size is None else even("batch_size", batch_size)
        super().__init__(seed)

    @classmethod
    def for_budget(cls: type[B], slots: int, seed: int = 0, **options: Any) -> B:
        """A sketch of at most ``slots`` slots.

        Raises:
            InputError: ``levels`` is given, with which the number would depend on the stream.
        """
        if "levels" in options:
            raise InputError(
                f"levels={options['levels']!r}: with levels the stream decides how many slots "
                "there are, and a budget bounds them; make the sketch itself, with batch_size and "
                "levels"
            )
        return cls(slots, seed=seed, **options)

    @abstractmethod
    def _weigh(self, new: Slots, there: Tensor) -> Tensor:
        """The weights of new tokens, float32 ``[batch, heads, q, columns]``, 0 for tokens that do
        not exist."""

    @abstractmethod
    def _halve(self, batch: Slots, weights: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """New weights of the slots of batches, 0 for those that are dropped, and which batches
        failed.

        Args:
            batch: ``[rows, batches, t, ...]``, with unweighted keys and values.
            weights: ``[rows, batches, t, columns]``, all 0 for the padding of a batch.
            streams: keys of the random streams, int64 ``[rows, batches]``.
        """

    @property
    def failures(self) -> Tensor:
        """Halvings that failed (the walk's FAIL), int64 ``[batch, heads]``."""
        self._require_tokens()
        return self.state["failed"]

    def most_bytes(self, token: Slots) -> int:
        return self.capacity * (token_bytes(token) + 4 * self.columns) + 16

    def widen(self, like: Sketch) -> None:
        assert isinstance(like, Bounded)
        self.capacity = max(self.capacity, like.capacity)

    @property
    def _size(self) -> int:
        """The current t."""
        return self.batch_size or min(BATCH, max(2, self.capacity // 16 * 2))

    def _check(self) -> None:
        held, fill, weights = self.get("held"), self.state["fill"], self.state["weights"]
        shape = (*held.keys.shape[:3], self.columns)
        if weights.shape != shape:
            raise InputError(f"weights {tuple(weights.shape)} must be {shape}")
        if bool(((fill < 0) | (fill > min(held.count, self.capacity))).any()):
            raise InputError(f"fill: more slots than the capacity of {self.capacity}")
        column = torch.arange(held.count, device=fill.device)
        lost = (column < fill.unsqueeze(-1)) & ~(weights > 0).any(-1)
        if bool(lost.any()) or bool((weights < 0).any()) or not bool(weights.isfinite().all()):
            raise InputError("weights must be finite and >= 0, and those of a slot not all 0")

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        there = torch.ones_like(new.keys[..., 0]).bool() if live is None else live
        if not self.state:
            self._begin(new)
        weights = self._weigh(new, there)
        self._take(Slots(new.keys, new.values, positions=new.positions), weights)

    def _begin(self, new: Slots) -> None:
        # Unweighted keys and values; places beyond ``fill`` are undefined.
        self.put("held", Slots(new.keys, new.values, positions=new.positions).narrow(0, 0))
        batch, heads = new.keys.shape[:2]
        device = new.keys.device
        empty = batch, heads, 0, self.columns
        self.state["weights"] = torch.zeros(empty, dtype=torch.float32, device=device)
        for name in ("fill", "failed"):
            self.state[name] = torch.zeros(batch, heads, dtype=torch.int64, device=device)

    def _take(self, new: Slots, weights: Tensor) -> None:
        """Add slots in order, and halve batches when room is needed. Slots of weight 0 are
        skipped."""
        there = (weights > 0).any(-1)
        order = there.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        left = there.sum(-1)
        order = order[..., : int(left.max())]
        new = new.take(order)
        weights = weights.gather(2, order.unsqueeze(-1).expand(*order.shape, self.columns))
        fill = self.state["fill"]
        # Tensors in use are not written to, because a halving may raise an error.
        width = min(self.capacity, int((fill + left).max()))
        held, old = self.get("held"), self.state["weights"]
        extra = max(0, width - held.count)
        held = held.map(lambda t: lengthened(t, extra))
        old = lengthened(old, extra)
        done = torch.zeros_like(left)
        column = torch.arange(new.count, device=fill.device)
        while True:
            count = torch.minimum(self.capacity - fill, left - done)
            offset = column - done.unsqueeze(-1)
            moved = (offset >= 0) & (offset < count.unsqueeze(-1))
            row = torch.arange(fill.numel(), device=fill.device).view(*fill.shape, 1)
            target = (row * held.count + fill.unsqueeze(-1) + offset)[moved]
            for name, tensor in held.tensors().items():
                tensor.flatten(0, 2)[target] = new.tensors()[name][moved]
            old.flatten(0, 2)[target] = weights[moved]
            fill, done = fill + count, done + count
            full = done < left
            if not bool(full.any()):
                break
            held, old, fill = self._collapsed(held, old, fill, full)
        self.put("held", held)
        self.state["weights"], self.state["fill"] = old, fill

    def _collapsed(
        self, held: Slots, weights: Tensor, fill: Tensor, full: Tensor
    ) -> tuple[Slots, Tensor, Tensor]:
        """Halve batches of the heads in ``full``."""
        streams = self.streams(where=full)[full]
        rows = full.flatten().nonzero().squeeze(1)
        part = held.map(lambda t: t.flatten(0, 1)[rows].unsqueeze(0))
        mine = weights.flatten(0, 1)[rows]
        column = torch.arange(held.count, device=fill.device)
        live = column < fill.flatten()[rows].unsqueeze(-1)
        mine, failed = self._reduced(part, mine, live, streams)
        self.state["failed"] = (
            self.state["failed"].flatten().index_add(0, rows, failed).view(fill.shape)
        )
        weights = weights.flatten(0, 1).index_copy(0, rows, mine).view(weights.shape)
        return packed(held, weights, fill)

    def _reduced(
        self, held: Slots, weights: Tensor, live: Tensor, streams: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The new weights ``[rows, slots, columns]`` of slots ``[1, rows, slots, ...]``, and the
        failures."""
        rows, slots, columns = weights.shape
        heaviest = weights.amax(-1)
        level = torch.frexp(heaviest).exponent.long().masked_fill(~live, _NOWHERE)
        most = max(1, int(_FREED * self.capacity / (self._size / 2)))
        source, alone = _batches(level, self._size, most)
        shape, index = source.shape, source.flatten(1).clamp(max=slots - 1)
        batch = held.take(index.unsqueeze(0)).map(lambda t: t.view(*shape, *t.shape[3:]))
        spread = index.unsqueeze(-1).expand(*index.shape, columns)
        before = weights.gather(1, spread).view(*shape, columns) * (source < slots).unsqueeze(-1)
        each = derived(streams.unsqueeze(1), torch.arange(shape[1], device=level.device))
        after, failed = self._halve(batch, before, each)
        target = source.flatten(1).unsqueeze(-1).expand(*index.shape, columns)
        padded = torch.cat([weights, weights.new_zeros(rows, 1, columns)], dim=1)
        weights = padded.scatter(1, target, after.flatten(1, 2))[:, :-1]
        if bool(alone.any()):
            # If every level has one slot, one of the two lightest gets the weight of both.
            pair = heaviest.masked_fill(~live, torch.inf).topk(2, dim=-1, largest=False).indices
            factor = _one_of(heaviest.gather(1, pair), uniform(derived(streams, -2), 1))
            factor = factor.masked_fill(~alone.unsqueeze(1), 1.0)
            weights = weights * torch.ones_like(heaviest).scatter(1, pair, factor).unsqueeze(-1)
        return weights, failed.sum(-1)

    def _merge(self, other: Sketch) -> None:
        assert isinstance(other, Bounded)
        self.state["failed"] = self.state["failed"] + other.state["failed"]
        column = torch.arange(other.get("held").count, device=self.state["fill"].device)
        there = column < other.state["fill"].unsqueeze(-1)
        self._take(other.get("held"), other.state["weights"] * there.unsqueeze(-1))

    def _live_weights(self) -> Tensor:
        """The weights, 0 beyond the slots of a head."""
        weights = self.state["weights"]
        column = torch.arange(weights.shape[2], device=weights.device)
        return weights * (column < self.state["fill"].unsqueeze(-1)).unsqueeze(-1)


def _batches(level: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """The slots that are halved together.

    Args:
        level: int64 ``[rows, slots]``, ``_NOWHERE`` for places without a slot.
        size: slots of a whole batch.
        most: batches of a row.

    Returns:
        The numbers of the slots, ``[rows, batches, t]``, in order. Numbers after the last slot pad
        a batch that has fewer. And the rows in which every level has one slot, so that there is no
        batch.
    """
    slots = level.shape[1]
    lowest = level.amin(-1, keepdim=True)
    depth = int((level - lowest).masked_fill(level == _NOWHERE, 0).max()) + 1
    number = (level - lowest).clamp(max=depth)
    count = torch.zeros(len(level), depth + 1, dtype=torch.int64, device=level.device)
    count = count.scatter_add(1, number, torch.ones_like(number))[:, :depth]
    # The lowest level with a whole batch, else the one with the most slots.
    whole = count >= size
    chosen = torch.where(whole.any(1), whole.long().argmax(1), count.argmax(1))
    there = count.gather(1, chosen.unsqueeze(1)).squeeze(1)
    each = torch.where(there >= size, size, there // 2 * 2)
    batches = torch.where(there >= size, (there // size).clamp(max=most), 1)
    mine = number == chosen.unsqueeze(1)
    rank = mine.cumsum(1) - 1
    mine &= rank < (each * batches).unsqueeze(1)
    # Slot p of these goes to place p % each of batch p // each.
    width, height = max(2, int(each.max())), int(batches.max())
    each = each.clamp(min=1).unsqueeze(1)
    place = torch.where(mine, rank // each * width + rank % each, height * width)
    source = place.new_full((len(level), height * width + 1), slots)
    column = torch.arange(slots, device=level.device).expand_as(place)
    source = source.scatter(1, place, column)[:, :-1]
    return source.view(len(level), height, width), there < 2


def packed(held: Slots, weights: Tensor, fill: Tensor) -> tuple[Slots, Tensor, Tensor]:
    """Remove slots of weight 0. The others keep their order."""
    column = torch.arange(held.count, device=fill.device)
    alive = (weights > 0).any(-1) & (column < fill.unsqueeze(-1))
    order = alive.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    spread = order.unsqueeze(-1).expand(*order.shape, weights.shape[3])
    return held.take(order), weights.gather(2, spread), alive.sum(-1)


def _one_of(pair: Tensor, chance: Tensor) -> Tensor:
    """Keep one of two slots, with probability in proportion to its weight, and give it the weight
    of both. Returns the factors of their weights, ``[rows, 2]``."""
    share = pair / pair.sum(-1, keepdim=True)
    first = (chance < share[:, :1]).to(pair.dtype)
    return torch.cat([first, 1 - first], dim=1) / share


def even(name: str, value: object) -> int:
    """Return ``value`` if it is an even int >= 2."""
    number = at_least(name, value, 2)
    if number % 2:
        raise InputError(f"{name}={value!r} must be even (a batch is halved)")
    return number
