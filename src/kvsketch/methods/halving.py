"""Halving: the choice of half the slots, which then represent all of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.methods.base import Compressor
from kvsketch.random_numbers import derived
from kvsketch.slots import Slots, compute_dtype


@dataclass(frozen=True)
class Half:
    """The outcome of one halving of n slots per head.

    Attributes:
        index: int64 ``[batch, heads, n // 2]``, the slots that are kept.
        real: bool of the same shape, False for the rest if fewer than n // 2 slots are kept.
        failed: bool ``[batch, heads]``, whether the method failed (as it defines failure).
    """

    index: Tensor
    real: Tensor
    failed: Tensor

    def of(self, slots: Slots) -> Slots:
        """The kept slots, with unchanged weights."""
        kept = slots.take(self.index)
        return kept if bool(self.real.all()) else kept.only(self.real)


class Halving(Compressor):
    """Base class of the halvings. A subclass chooses half of an even number of slots (``half``).
    The weights of the chosen slots are doubled.

    As a compressor, it halves the slots until at most twice the budget is left. It then halves only
    the slots of smallest mass (of equal ones the oldest), as many as needed, so that exactly
    ``budget`` slots remain.

    Args:
        seed: see Compressor.
        scaling: multiplies <k, k'>. Default: 1/sqrt(head_dim).
    """

    def __init__(self, seed: int = 0, scaling: float | None = None) -> None:
        super().__init__(seed)
        self.scaling = scaling

    @abstractmethod
    def half(self, slots: Slots, streams: Tensor | None = None) -> Half:
        """Choose half of an even number of slots. Dead slots take part as zero vectors.

        Args:
            slots: ``[batch, heads, n, ...]``.
            streams: keys of the random streams, int64 ``[batch, heads]``. None: new streams.
        """

    def streams_for(self, slots: Slots) -> Tensor:
        """New random streams for the rows and heads of ``slots``."""
        batch, heads = slots.keys.shape[:2]
        return self.streams(batch, heads, slots.keys.device)

    def scale(self, slots: Slots) -> float:
        return slots.keys.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        assert isinstance(budget, int)  # the class is not ragged
        streams, rounds = self.streams_for(slots), 0
        while slots.count > budget:
            target = max(budget, (slots.count + 1) // 2)
            slots = self._halved(slots, target, derived(streams, rounds))
            rounds += 1
        return slots

    def _halved(self, slots: Slots, target: int, streams: Tensor) -> Slots:
        """Reduce ``slots`` to ``target`` slots, which must be at least half of them."""
        n = slots.count
        live = slots.live()
        mass = slots.masses().double()
        if live is None:
            live = torch.ones_like(mass, dtype=torch.bool)
        # Live slots of smallest mass come first. A slot without mass counts as one token.
        weight = torch.where(mass > 0, mass, 1.0).masked_fill(~live, torch.inf)
        order = weight.argsort(dim=-1, stable=True)
        total = live.sum(-1, keepdim=True)
        excess = (total - target).clamp(min=0)
        width = 2 * int(excess.max())
        column = torch.arange(n, device=mass.device)
        untouched = (column >= 2 * excess) & (column < total)
        index, real, doubled = order, untouched, torch.ones_like(mass)
        if width:
            # Restore the order of the tokens, because pairs should consist of neighbours.
            chosen = order[..., :width]
            within = column[:width] < 2 * excess
            chosen = torch.where(within, chosen, n).sort(dim=-1).values
            part = slots.take(chosen.clamp(max=n - 1)).only(within)
            half = self.half(part, streams)
            kept = chosen.gather(-1, half.index).clamp(max=n - 1)
            index = torch.cat([kept, index], dim=-1)
            real = torch.cat([half.real & within.gather(-1, half.index), real], dim=-1)
            doubled = torch.cat([torch.full_like(kept, 2.0, dtype=mass.dtype), doubled], dim=-1)
        best = torch.where(real, index, n).sort(dim=-1, stable=True)
        picked = best.indices[..., :target]
        weights = doubled.gather(-1, picked) * (best.values[..., :target] < n)
        return slots.take(best.values[..., :target].clamp(max=n - 1)).scaled(
            weights.to(slots.masses().dtype)
        )


def flat(slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and masses in the dtype of the computation, ``[R, n, ...]``, R = batch x heads.

    Masses have a last axis of 1. Keys of dead slots are set to 0, so that they affect no radius.
    """
    dtype = compute_dtype(slots.keys.dtype)
    keys, values = (t.to(dtype).flatten(0, 1) for t in (slots.keys, slots.values))
    live = slots.live()
    if live is not None:
        keys = keys * live.flatten(0, 1).unsqueeze(-1)
    return keys, values, slots.masses().to(dtype).flatten(0, 1).unsqueeze(-1)


def with_mass(values: Tensor, mass: Tensor) -> Tensor:
    """u and m, concatenated and weighted so that both count alike, ``[R, n, value_dim + 1]``.
    Balancing then serves both numerator and denominator."""
    size = values.square().sum((1, 2), keepdim=True) / mass.square().sum((1, 2), True).clamp(
        min=1e-30
    )
    size = torch.where(size > 0, size, 1.0)
    return torch.cat([values, mass * size.sqrt()], dim=-1)
