"""How clusterable keys are: Definition 1 of SubGen (2.1 of ClusterGen, 10 of Compression Barriers)
as a curve over the number of clusters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.farthest_first import farthest_first
from kvsketch.theory.parameters import number


@dataclass(frozen=True)
class ClusterCurve:
    """For each m, the smallest delta for which the keys are (m, delta)-clusterable lies in
    ``[lower, upper]``, where upper = 2 lower.

    Attributes:
        m: int64 ``[M]``: 1, 2, ..., M.
        lower: float64 ``[batch, heads, M]``, in units of the keys: m + 1 keys are pairwise at
            least this far apart, so two of them share a cluster of that diameter.
        upper: same shape: m centers have every key within upper / 2, so clusters around them have
            at most this diameter.
        count: n, keys per head.
    """

    m: Tensor
    lower: Tensor
    upper: Tensor
    count: int

    def clusters(self, delta: float) -> Tensor:
        """The smallest m for which ``upper`` is at most delta, int64 ``[batch, heads]``: the keys
        are (m, delta)-clusterable, and SubGen finds at most m clusters of radius delta. It is n if
        the curve does not reach delta.

        Raises:
            InputError: delta is not a number >= 0.
        """
        delta = number("delta", delta, ">= 0", lambda x: x >= 0)
        above = (self.upper > delta).sum(-1)  # upper decreases
        return torch.where(above < self.m.numel(), above + 1, self.count)


def clusterability(keys: Tensor, max_clusters: int = 256) -> ClusterCurve:
    """The curve for m = 1 .. min(max_clusters, n), from one farthest-first traversal: the distance
    rho_m at which its center number m + 1 is inserted is the covering radius of the first m, and
    the first m + 1 are pairwise at least rho_m apart. O(n M head_dim) time.

    The computation is in float64 around the mean key. Distances below about 1e-7 of the largest are
    lost in rounding.

    Args:
        keys: ``[batch, heads, n, head_dim]``, finite.
        max_clusters: M at most, >= 1.

    Raises:
        InputError: wrong shape, no key, keys not finite, or max_clusters < 1.
    """
    at_least("max_clusters", max_clusters, 1)
    if keys.dim() != 4 or keys.shape[2] == 0:
        raise InputError(f"keys must be [batch, heads, n >= 1, head_dim], got {tuple(keys.shape)}")
    if not bool(torch.isfinite(keys).all()):
        raise InputError("keys are not finite (NaN or infinity)")
    n = keys.shape[2]
    count = min(max_clusters, n)
    centered = keys.double() - keys.double().mean(2, keepdim=True)
    inserted = farthest_first(centered, None, count + 1)
    # The entry of the first center is above all others. An entry of 1e-18 of farthest_first is 0.
    radius = inserted.sort(dim=-1, descending=True).values[..., 1 : count + 1]
    radius = torch.where(radius > 1e-18, radius, 0.0)
    missing = radius.new_zeros(*radius.shape[:2], count - radius.shape[2])
    lower = torch.cat([radius, missing], dim=-1)  # n clusters: radius 0
    return ClusterCurve(torch.arange(1, count + 1, device=keys.device), lower, 2 * lower, n)
