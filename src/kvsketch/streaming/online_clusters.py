"""Online clustering by the rule of SubGen's Algorithm 1, a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """Where the points of a chunk went; R = batch x heads.

    Attributes:
        cluster: int64 ``[R, c]``, numbered on from the clusters that were there.
        is_new: bool ``[R, c]``, True for a point that became a representative.
        overflow: bool ``[R]``, True where a point beyond delta found no room for a cluster and
            went to the nearest one instead.
    """

    cluster: Tensor
    is_new: Tensor
    overflow: Tensor


def assign(
    points: Tensor, live: Tensor, centers: Tensor, used: Tensor, delta: Tensor, room: Tensor
) -> Assignment:
    """Assign points to clusters in order: to the nearest representative if it lies within delta,
    else to a new cluster that the point represents (Algorithm 1, lines 11-20).

    Equals the loop over single points. Distances to the representatives that are there come in
    bulk; only the points beyond delta are gone through in order. Candidates for the nearest
    representative come from a float32 (or float64) expansion of |x - k|^2; the comparison with
    delta uses the difference itself.

    Args:
        points: ``[R, c, d]``, floating point.
        live: bool ``[R, c]``; others do not exist (their cluster is 0).
        centers: representatives, ``[R, M, d]``, of which the first ``used`` are valid.
        used: int64 ``[R]``.
        delta: ``[R]``.
        room: int64 ``[R]``, how many clusters may still be opened; at least 1 where used is 0.
    """
    rows, count, _ = points.shape
    limit = delta.to(points.dtype).square().unsqueeze(1)
    nearest, old = _nearest(points, centers, used)
    beyond = live & (nearest > limit)
    is_new = torch.zeros_like(live)
    overflow = torch.zeros(rows, dtype=torch.bool, device=points.device)
    if not bool(beyond.any()):
        return Assignment(torch.where(live, old, 0), is_new, overflow)

    # The points beyond delta, first in first place; those of shorter rows are no candidates.
    most = int(beyond.sum(1).max())
    where = beyond.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    candidates = _rows(points, where)
    open_ = beyond.gather(1, where)
    close = _squared(candidates, candidates) <= limit.unsqueeze(1)
    chosen = torch.zeros_like(open_)
    order = torch.arange(most, device=points.device)
    row = torch.arange(rows, device=points.device)
    left = room.clone()
    while bool(open_.any()):
        first = torch.where(open_, order, most).amin(1)
        opens = (first < most) & (left > 0)
        overflow |= (first < most) & (left <= 0)
        first = first.clamp(max=most - 1)
        chosen[row, first] |= opens
        left -= opens.long()
        open_ &= ~close[row, first]
        open_[row, first] = False
        open_ &= opens.unsqueeze(1)  # a full row is done, and so is one without candidates

    is_new.scatter_(1, where, chosen)
    new_count = int(chosen.sum(1).max())
    if new_count == 0:
        return Assignment(torch.where(live, old, 0), is_new, overflow)
    source = is_new.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :new_count]
    real = is_new.gather(1, source)
    squared = _squared(points, _rows(points, source))
    # A representative exists for its own point and later ones; its own distance is exactly 0.
    position = torch.arange(count, device=points.device)
    squared.masked_fill_(source.unsqueeze(1) == position[None, :, None], 0.0)
    squared.masked_fill_(~real.unsqueeze(1) | (source.unsqueeze(1) > position[:, None]), torch.inf)
    nearest_new, new = squared.min(2)
    take_new = is_new | (nearest_new < nearest)
    return Assignment(
        torch.where(live, torch.where(take_new, used.unsqueeze(1) + new, old), 0), is_new, overflow
    )


def _nearest(points: Tensor, centers: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance to, and number of, the nearest of the first ``used`` centers."""
    rows, count, _ = points.shape
    most = int(used.max())
    if most == 0:
        far = torch.full((rows, count), torch.inf, dtype=points.dtype, device=points.device)
        return far, torch.zeros(rows, count, dtype=torch.int64, device=points.device)
    centers = centers[:, :most]
    # |k|^2 is the same for every center: leave it out of the search.
    norms = centers.square().sum(-1)
    absent = torch.arange(most, device=points.device) >= used.unsqueeze(1)
    norms = norms.masked_fill(absent, torch.inf).unsqueeze(1)
    found = torch.baddbmm(norms, points, centers.transpose(1, 2), alpha=-2).argmin(2)
    exact = (points - _rows(centers, found)).square().sum(-1)
    return exact.masked_fill(used.unsqueeze(1) == 0, torch.inf), found


def _squared(points: Tensor, others: Tensor) -> Tensor:
    """|x - y|^2, ``[R, c, m]``."""
    squared = torch.baddbmm(
        others.square().sum(-1).unsqueeze(1), points, others.transpose(1, 2), alpha=-2
    )
    return squared.add_(points.square().sum(-1).unsqueeze(2)).clamp_(min=0.0)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[r, index[r]]``: ``[R, n, d]`` and ``[R, k]`` to ``[R, k, d]``."""
    rows, n, dim = tensor.shape
    start = torch.arange(0, rows * n, n, device=tensor.device).unsqueeze(1)
    flat = tensor.reshape(rows * n, dim).index_select(0, (index + start).flatten())
    return flat.view(rows, index.shape[1], dim)


def within_cluster(cluster: Tensor, weight: Tensor) -> Tensor:
    """For each point of a chunk, the weight of the points of its cluster up to and including it.

    Args:
        cluster: int64 ``[R, c]``.
        weight: float64 ``[R, c]``.
    """
    order = cluster.argsort(dim=1, stable=True)
    sums = weight.gather(1, order).cumsum(1)
    ordered = cluster.gather(1, order)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    before = torch.where(starts, sums - weight.gather(1, order), 0.0).cummax(1).values
    return torch.zeros_like(sums).scatter_(1, order, sums - before)
