"""Kernel halving of pairs, by a walk with an adaptive threshold, and greedy halving."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.balance import Decide, Lifted, Vectors, balance
from kvsketch.methods.halving import Half, Halving, flat, with_mass
from kvsketch.random_numbers import uniform
from kvsketch.slots import Slots


@dataclass(frozen=True)
class _Pairs(Vectors):
    """The differences of neighbours, vector 2i minus vector 2i + 1."""

    singles: Lifted

    @property
    def size(self) -> tuple[int, int]:
        rows, count = self.singles.size
        return rows, count // 2

    def inner(self, first: slice, second: slice) -> Tensor:
        whole = self.singles.inner(_doubled(first), _doubled(second))
        differ = whole[:, 0::2] - whole[:, 1::2]
        return differ[..., 0::2] - differ[..., 1::2]


def _doubled(part: slice) -> slice:
    return slice(2 * part.start, 2 * part.stop)


class _PairHalving(Halving):
    """Base class of methods in which neighbouring slots form pairs, and one slot of each pair is
    kept, so that exactly half are kept whatever the signs.

    The vectors phi(k) (x) (u, g m) are balanced, with g such that u and m count alike, so that one
    choice serves numerator and denominator.
    """

    def half(self, slots: Slots, streams: Tensor | None = None) -> Half:
        batch, heads, n = slots.keys.shape[:3]
        streams = self.streams_for(slots) if streams is None else streams
        live = slots.live()
        if live is not None:  # two live slots or two dead ones form a pair as far as possible
            order = live.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            slots, live = slots.take(order), live.gather(-1, order)
        keys, values, mass = flat(slots)
        vectors = with_mass(values, mass)
        scaling = self.scale(slots)
        shift = scaling * keys.square().sum(-1).amax(-1)
        pairs = _Pairs(Lifted(keys, vectors, scaling, shift))
        signs = balance(pairs, self.decide(pairs, streams.flatten())).view(batch, heads, -1)
        second = signs < 0
        if live is not None:  # of a live and a dead slot the live one is kept
            second &= live[..., 1::2]
        index = torch.arange(0, n, 2, device=signs.device) + second.long()
        if live is not None:
            index = order.gather(-1, index)
        real = torch.ones_like(second)
        return Half(index, real, real.new_zeros(batch, heads))

    @abstractmethod
    def decide(self, pairs: _Pairs, streams: Tensor) -> Decide:
        """A new rule for the signs, of which +1 keeps the first slot of a pair. ``streams`` is
        ``[R]``."""


class KernelHalving(_PairHalving):
    """Kernel halving. Ours for attention, after Dwivedi and Mackey's kernel thinning (2105.05842,
    Algorithms 1a and 3). It balances pairs instead of single vectors, and its threshold adapts to
    the norms so far, instead of being c R^2 for the largest possible norm.

    Args:
        seed: of the walk.
        scaling: of the scores, default 1/sqrt(head_dim).
        delta: failure probability per step of the sub-Gaussian bound, in (0, 1).
    """

    name = "kernel_halving"
    paper = "ours, after Dwivedi and Mackey, kernel thinning (2105.05842)"

    def __init__(self, seed: int = 0, scaling: float | None = None, delta: float = 0.5) -> None:
        super().__init__(seed, scaling)
        if not 0 < delta < 1:
            raise InputError(f"delta={delta!r} must lie in (0, 1)")
        self.delta = delta

    def decide(self, pairs: _Pairs, streams: Tensor) -> Decide:
        rows, count = pairs.size
        chance = uniform(streams, count)
        spread = pairs.singles.keys.new_zeros(rows)  # sigma^2 of the sub-Gaussian signed sum
        factor = 2 * math.log(2 / self.delta)

        def rule(pending: Tensor, norm: Tensor, step: int) -> Tensor:
            norm = norm.clamp(min=0.0)
            limit = torch.maximum((norm * spread * factor).sqrt(), norm)
            limit = limit.clamp(min=torch.finfo(limit.dtype).tiny)
            ratio = spread / limit
            spread.add_(norm * (1 + (norm / limit - 2) * ratio).clamp(min=0.0))
            up = chance[:, step] < 0.5 - pending / (2 * limit)
            return torch.where(up, 1.0, -1.0).to(pending.dtype)

        return rule


class GreedyHalving(_PairHalving):
    """Greedy halving. Ours. Of each pair, the slot that makes the signed sum smaller is kept.

    Only ties are random, so that no bound holds for adversarial input. In measurements on real
    activations it is the best of the halvings.

    Args:
        seed: of the ties.
        scaling: of the scores, default 1/sqrt(head_dim).
    """

    name = "greedy_halving"
    paper = "ours"

    def decide(self, pairs: _Pairs, streams: Tensor) -> Decide:
        coin = uniform(streams, pairs.size[1]) < 0.5

        def rule(pending: Tensor, norm: Tensor, step: int) -> Tensor:
            tie = torch.where(coin[:, step], 1.0, -1.0).to(pending.dtype)
            return torch.where(pending == 0, tie, -pending.sign())

        return rule
