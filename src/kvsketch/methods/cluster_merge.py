"""Merge clusters of tokens into one slot each. Ours."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.base import Compressor
from kvsketch.methods.clustering import check_pairs, group
from kvsketch.methods.groups import merge
from kvsketch.slots import Slots, compute_dtype

# When pairs are chosen, the newest slot weighs e^4 times as much as the oldest.
_RECENCY = 4.0


class ClusterMerge(Compressor):
    """Group the closest tokens and keep, for each group, (mean key, sum of u, sum of m).

    Nothing is dropped: every token's value and mass stay in the sums, and only its key is replaced
    by the mean of its group. No queries are used. For weighted input, means are weighted by mass,
    so that repeated compressions merge consistently.

    Groups grow by rounds of merging the cheapest pairs by Ward's cost over keys and values,
    with weights that favour new tokens over old ones, because later
    queries attend more to nearby tokens. A page that is full again takes one round. The time is
    nearly linear, because pairs are searched within blocks of 256 slots.

    Args:
        seed: unused; there is no randomness.
        steps: Lloyd iterations, >= 1, where k-means groups the keys instead: with ``pairs`` 0, or
            where too many costs are equal.
        pairs: the fraction of the slots that is merged in a round, in (0, 1/2]; 0: k-means.

    Raises:
        InputError: an argument out of range.
    """

    name = "cluster_merge"
    paper = "ours"
    ragged = True

    def __init__(self, seed: int = 0, steps: int = 5, pairs: float = 0.25) -> None:
        super().__init__(seed)
        self.steps = at_least("steps", steps, 1)
        self.pairs = check_pairs(pairs)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        batch, heads, n = slots.keys.shape[:3]
        dtype = compute_dtype(slots.keys.dtype)
        mass = slots.masses().reshape(batch * heads, n).to(dtype)
        # A slot with u but no mass must also be in a group: count it as one token.
        weight = torch.where(mass > 0, mass, 1.0)
        live, sizes = slots.live(), None
        if live is not None:
            live = live.reshape(batch * heads, n)
            weight = weight * live
            sizes = live.sum(1) if isinstance(budget, Tensor) else None
        count = budget.flatten() if isinstance(budget, Tensor) else budget
        price = weight * _age(n, sizes, weight).exp()
        groups = group(slots, weight, price, count, self.steps, self.pairs, sizes=sizes)
        return merge(slots, groups, weight)


def _age(n: int, sizes: Tensor | None, like: Tensor) -> Tensor:
    """From 0 for the oldest slot to ``_RECENCY`` for the newest one of a row of ``sizes`` slots."""
    if sizes is None:
        return torch.linspace(0, _RECENCY, n, dtype=like.dtype, device=like.device)
    column = torch.arange(n, dtype=like.dtype, device=like.device)
    return _RECENCY * column / (sizes.unsqueeze(1) - 1).clamp(min=1)
