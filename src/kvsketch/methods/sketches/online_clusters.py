"""Online clustering by the rule of SubGen's Algorithm 1, chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvsketch.kernels.pairs import WIDTH, least


@dataclass(frozen=True)
class Assignment:
    """The clusters of the points of a chunk. R = batch x heads.

    Attributes:
        cluster: int64 ``[R, c]``. New clusters get the numbers after those of the existing ones.
        is_new: bool ``[R, c]``, True for a point that became a representative.
        overflow: bool ``[R]``, True if a point beyond delta had no room for a new cluster and was
            put into the nearest one instead.
    """

    cluster: Tensor
    is_new: Tensor
    overflow: Tensor


def assign(
    points: Tensor, live: Tensor, centers: Tensor, used: Tensor, delta: Tensor, room: Tensor
) -> Assignment:
    """Assign points to clusters in order: to the nearest representative if it lies within delta,
    else to a new cluster that the point represents (Algorithm 1, lines 11-20).

    The result is that of the loop over single points. Distances to existing representatives are
    computed for all points together, and only the points beyond delta are processed in order.
    Distances come from an expansion of |x - k|^2, whose rounding depends on the shapes of the
    matrix product. They are computed again in float64 wherever rounding could affect the result.
    The comparison of single points with delta uses the difference x - k itself.

    Args:
        points: ``[R, c, d]``, floating point.
        live: bool ``[R, c]``. Other points do not exist (their cluster is 0).
        centers: representatives, ``[R, M, d]``, of which the first ``used`` are valid.
        used: int64 ``[R]``.
        delta: ``[R]``.
        room: int64 ``[R]``, the number of clusters that may be added, at least 1 where used is 0.
    """
    rows, count, _ = points.shape
    limit = delta.to(points.dtype).square().unsqueeze(1)
    nearest, old = _nearest(points, centers, used)
    beyond = live & (nearest > limit)
    is_new = torch.zeros_like(live)
    overflow = torch.zeros(rows, dtype=torch.bool, device=points.device)
    if not bool(beyond.any()):
        return Assignment(torch.where(live, old, 0), is_new, overflow)

    # The points beyond delta, in order. Rows with fewer of them are padded.
    most = int(beyond.sum(1).max())
    where = beyond.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    candidates = _rows(points, where)
    open_ = beyond.gather(1, where)
    close = _within(candidates, limit)
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
        open_ &= opens.unsqueeze(1)  # a row is finished if it is full or has no candidates left

    is_new.scatter_(1, where, chosen)
    new_count = int(chosen.sum(1).max())
    if new_count == 0:
        return Assignment(torch.where(live, old, 0), is_new, overflow)
    source = is_new.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :new_count]
    real = is_new.gather(1, source)
    # A representative exists for its own point and for later points.
    position = torch.arange(count, device=points.device)
    given = torch.zeros_like(source.unsqueeze(1).expand(-1, count, -1), dtype=points.dtype)
    given.masked_fill_(source.unsqueeze(1) > position[:, None], torch.inf)
    given.masked_fill_(real.unsqueeze(1) & (source.unsqueeze(1) == position[:, None]), -torch.inf)
    nearest_new, new = _least(points, _rows(points, source), real, given)
    take_new = is_new | (nearest_new < nearest)
    return Assignment(
        torch.where(live, torch.where(take_new, used.unsqueeze(1) + new, old), 0), is_new, overflow
    )


def _nearest(points: Tensor, centers: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distance to the nearest of the first ``used`` centers, and its number."""
    rows, count, _ = points.shape
    most = int(used.max())
    if most == 0:
        far = torch.full((rows, count), torch.inf, dtype=points.dtype, device=points.device)
        return far, torch.zeros(rows, count, dtype=torch.int64, device=points.device)
    there = torch.arange(most, device=points.device) < used.unsqueeze(1)
    return _least(points, centers[:, :most], there)


def _least(
    points: Tensor, centers: Tensor, there: Tensor, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The squared distance to the nearest center, and its number. Without any center, the distance
    is infinite and the number undefined.

    Args:
        points: ``[R, c, d]``.
        centers: ``[R, M, d]``, M >= 1.
        there: bool ``[R, M]``, which of them exist.
        given: ``[R, c, M]``, infinite for pairs that are excluded, minus infinite for pairs that
            are required, 0 for all others.
    """
    extra = -centers.shape[1] % WIDTH
    centers, there = F.pad(centers, (0, 0, 0, extra)), F.pad(there, (0, extra))
    norms = centers.square().sum(-1)
    distance = _expanded(points, centers, norms.masked_fill(~there, torch.inf))
    if given is not None:
        given = F.pad(given, (0, extra))
        distance += given
    low, found = least(distance)
    runner_up = distance.scatter_(2, found.unsqueeze(2), torch.inf).amin(2)
    margin = _margin(points, norms.masked_fill_(~there, 0.0))
    doubtful = (runner_up <= low + margin.squeeze(2)) & torch.isfinite(low)
    if bool(doubtful.any()):
        most = int(doubtful.sum(1).max())
        where = doubtful.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        finer = centers.double()
        norms = finer.square().sum(-1).masked_fill_(~there, torch.inf)
        distance = _expanded(_rows(points, where).double(), finer, norms)
        if given is not None:
            distance += _rows(given, where)
        mine = torch.where(doubtful.gather(1, where), least(distance)[1], found.gather(1, where))
        found = found.scatter(1, where, mine)
    exact = (points - _rows(centers, found)).square().sum(-1)
    return exact.masked_fill(low == torch.inf, torch.inf), found


def _within(points: Tensor, limit: Tensor) -> Tensor:
    """Whether points are within a squared distance (``[R, 1]``) of each other, ``[R, c, c]``."""

    def above(points: Tensor) -> Tensor:
        norms = points.square().sum(-1)
        distance = _expanded(points, points, norms)
        return distance.add_(norms.unsqueeze(2)).sub_(limit.unsqueeze(2))

    difference = above(points)
    close = difference <= 0
    doubtful = difference.abs_() <= _margin(points, points.square().sum(-1))
    if bool(doubtful.any()):
        close = torch.where(doubtful, above(points.double()) <= 0, close)
    return close


def _expanded(points: Tensor, centers: Tensor, norms: Tensor) -> Tensor:
    """|k|^2 - 2 <x, k>, ``[R, c, M]``, without |x|^2, which is the same for every center. ``norms``
    are |k|^2."""
    return torch.baddbmm(norms.unsqueeze(1), points, centers.mT, alpha=-2)


def _margin(points: Tensor, norms: Tensor) -> Tensor:
    """An upper bound of the rounding of squared distances, ``[R, c, 1]``. ``norms`` are |k|^2,
    ``[R, M]``."""
    share = math.sqrt(points.shape[2]) * torch.finfo(points.dtype).eps
    return share * (points.square().sum(-1) + norms.amax(1, keepdim=True)).unsqueeze(2)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[r, index[r]]`` for each row r, ``[R, k, d]``, from ``[R, n, d]`` and ``[R, k]``."""
    rows, n, dim = tensor.shape
    start = torch.arange(0, rows * n, n, device=tensor.device).unsqueeze(1)
    flat = tensor.reshape(rows * n, dim).index_select(0, (index + start).flatten())
    return flat.view(rows, index.shape[1], dim)


def within_cluster(cluster: Tensor, weight: Tensor) -> Tensor:
    """For each point of a chunk, the summed weight of the points of its cluster up to and including
    it.

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
