"""Merge clusters of tokens into one slot each. Ours."""

from __future__ import annotations

import torch

from ..errors import at_least
from ..slots import Slots, compute_dtype
from .base import Compressor
from .clustering import group_keys, merge


class ClusterMerge(Compressor):
    """Group the keys by k-means and keep, for each group, (mean key, sum of u, sum of m).

    Nothing is dropped: every token's value and mass stay in the sums, and only its key moves, to
    the mean of its group. Sees no queries. On weighted input means are weighted by mass, so that
    compressing again merges the same way. Near-linear: keys are grouped within blocks of 2,048
    slots.

    Args:
        seed: unused; there is no randomness.
        steps: Lloyd iterations, >= 1.
    """

    name = "cluster_merge"
    paper = "ours"

    def __init__(self, seed: int = 0, steps: int = 5) -> None:
        super().__init__(seed)
        self.steps = at_least("steps", steps, 1)

    def compress(self, slots: Slots, budget: int) -> Slots:
        if budget == 0:
            return slots.narrow(0, 0)
        batch, heads, n = slots.keys.shape[:3]
        dtype = compute_dtype(slots.keys.dtype)
        mass = slots.masses().reshape(batch * heads, n).to(dtype)
        # A slot with u but no mass still has to land somewhere: count it as one token.
        live = slots.live()
        weight = torch.where(mass > 0, mass, 1.0)
        if live is not None:
            weight = weight * live.reshape(batch * heads, n)
        keys = slots.keys.reshape(batch * heads, n, -1).to(dtype)
        groups = group_keys(keys, weight, budget, self.steps)
        return merge(slots, groups, weight)
