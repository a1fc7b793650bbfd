"""What the closest slots are told by: keys with their values beside them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..slots import Slots, flat_rows

# How much values count beside keys when pairs are chosen.
_VALUES = 0.25


class Points(Protocol):
    """Points of R rows of n slots, float32 or float64."""

    def places(self, columns: Tensor) -> Tensor:
        """Places of slots: int64 ``[R, m]``, columns of each row, to the same of numbers."""

    def at(self, places: Tensor) -> Tensor:
        """``[b, s, dim]``, a tensor of its own. ``places``: int64 ``[b, s]``, all of one row of
        slots for each b."""


class Given:
    """Points that are there already, ``[R, n, dim]``."""

    def __init__(self, points: Tensor) -> None:
        self.points, self._step = points.flatten(0, 1), points.shape[1]

    def places(self, columns: Tensor) -> Tensor:
        return _places(columns, self._step)

    def at(self, places: Tensor) -> Tensor:
        return _rows(self.points, places)

    def merge(
        self, places: Tensor, targets: Tensor, group: Tensor, weight: Tensor, total: Tensor
    ) -> None:
        """Overwrite the points at ``targets`` (int64 ``[g]``) with the means of groups.

        Args:
            places: of the members, int64 ``[m]``.
            group: of each member, int64 ``[m]``, less than g.
            weight: of each member, ``[m]``.
            total: of each group's members, ``[g]``.
        """
        members = self.points.index_select(0, places).mul_(weight.unsqueeze(1))
        mean = members.new_zeros(len(targets), members.shape[1])
        mean.scatter_add_(0, group.unsqueeze(1).expand_as(members), members)
        self.points.index_copy_(0, targets, mean.div_(total.clamp(min=1e-30).unsqueeze(1)))


class KeysAndValues:
    """Keys and u / m side by side, less their means over the live slots of a row: large norms would
    cost digits in |x|^2 - 2<x, y> + |y|^2. Values are scaled to the keys' spread and count for a
    quarter. A point is formed where it is used: all at once they would be as large as the cache.

    Args:
        slots: ``[batch, heads, n, ...]``, R = batch x heads.
        live: ``[R, n]``, in the dtype of the points: 1 for slots that are grouped, else 0.
    """

    def __init__(self, slots: Slots, live: Tensor) -> None:
        (self._keys, self._step), (self._values, step) = map(flat_rows, (slots.keys, slots.values))
        if step != self._step:
            self._keys, self._step = flat_rows(slots.keys.contiguous())
            self._values, _ = flat_rows(slots.values.contiguous())
        share, self._share = live, None
        if slots.mass is not None:
            mass = torch.where(slots.mass > 0, slots.mass, 1.0)
            per_mass = mass.to(live.dtype).flatten(0, 1).reciprocal()
            share = live * per_mass
            # one row of slots ends where the next begins
            table = per_mass.new_ones(len(per_mass), self._step)
            table[:, : per_mass.shape[1]] = per_mass
            self._share = table.view(-1, 1)
        count = live.sum(1, keepdim=True).clamp_(min=1)
        key_mean, key_spread = _moments(slots.keys.flatten(0, 1), live, count)
        value_mean, value_spread = _moments(slots.values.flatten(0, 1), share, count)
        scale = _VALUES**0.5 * key_spread / value_spread.clamp_(min=1e-30)
        self._mean = torch.cat([key_mean, value_mean], dim=-1).unsqueeze(1)
        self._scale = scale.to(live.dtype).unsqueeze(1)

    def places(self, columns: Tensor) -> Tensor:
        return _places(columns, self._step)

    def at(self, places: Tensor) -> Tensor:
        row = places[:, 0] // self._step
        mean, dim = self._mean[row], self._keys.shape[1]
        points = torch.empty(*places.shape, mean.shape[2], dtype=mean.dtype, device=mean.device)
        keys, values = points[..., :dim], points[..., dim:]
        torch.sub(_rows(self._keys, places), mean[..., :dim], out=keys)
        found = _rows(self._values, places)
        if self._share is not None:
            found = found * _rows(self._share, places)
        torch.sub(found, mean[..., dim:], out=values)
        values *= self._scale[row]
        return points


def _places(columns: Tensor, step: int) -> Tensor:
    return columns + step * torch.arange(len(columns), device=columns.device).unsqueeze(1)


def _rows(flat: Tensor, places: Tensor) -> Tensor:
    return flat.index_select(0, places.flatten()).view(*places.shape, flat.shape[1])


def _moments(x: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of x times weight, ``[R, d]``, and the norm of what differs from it, float64 ``[R, 1]``.

    Args:
        x: ``[R, n, d]``.
        weight: ``[R, n]``.
        count: ``[R, 1]``, of live slots.
    """
    mean = torch.matmul(weight.unsqueeze(1), x.to(weight.dtype)).squeeze(1) / count
    size = (torch.linalg.vector_norm(x, dim=-1, dtype=weight.dtype) * weight).double()
    rest = size.square().sum(1, keepdim=True) - count * mean.double().square().sum(1, keepdim=True)
    return mean, rest.clamp_(min=0.0).sqrt_()
