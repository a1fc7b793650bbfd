"""The points by which the closest slots are found: keys and values, concatenated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kvsketch.slots import Slots, flat_rows

# The weight of values relative to keys when pairs are chosen.
_VALUES = 0.25
# The number of columns whose points are computed at a time.
_COLUMNS = 2048


class _Rows(ABC):
    """Points of R rows of slots, float32 or float64.

    Attributes:
        dim: coordinates of a point.
    """

    dim: int
    _step: int  # places from one row to the next

    def places(self, columns: Tensor) -> Tensor:
        """The places of the points of slots, int64 ``[R, m]``, given the columns of the slots in
        their rows, in the same shape."""
        return columns + self._step * torch.arange(len(columns), device=columns.device)[:, None]

    @abstractmethod
    def blocks(self, row: Tensor, places: Tensor, step: int) -> Iterator[Tensor]:
        """The points of ``step`` blocks at a time (fewer at the end), ``[step, s, dim]``.

        Args:
            row: the row of each block, int64 ``[b]``.
            places: the places of its slots, int64 ``[b, s]``.
            step: >= 1.
        """


class Given(_Rows):
    """Points that are given explicitly, ``[R, n, dim]``."""

    def __init__(self, points: Tensor) -> None:
        self.points, self._step = points.flatten(0, 1), points.shape[1]
        self.dim = points.shape[2]

    def blocks(self, row: Tensor, places: Tensor, step: int) -> Iterator[Tensor]:
        return (_rows(self.points, part) for part in torch.split(places, step))

    def merge(
        self, places: Tensor, targets: Tensor, group: Tensor, weight: Tensor, total: Tensor
    ) -> None:
        """Overwrite the points at ``targets`` (int64 ``[g]``) with the means of groups.

        Args:
            places: the places of the members, int64 ``[m]``.
            group: the group of each member, int64 ``[m]``, less than g.
            weight: the weight of each member, ``[m]``.
            total: the summed weight of each group, ``[g]``.
        """
        members = self.points.index_select(0, places).mul_(weight.unsqueeze(1))
        mean = members.new_zeros(len(targets), members.shape[1])
        mean.scatter_add_(0, group.unsqueeze(1).expand_as(members), members)
        self.points.index_copy_(0, targets, mean.div_(total.clamp(min=1e-30).unsqueeze(1)))


class KeysAndValues(_Rows):
    """Keys and values u / m, concatenated, minus their means over the live slots of a row, because
    large norms would cost digits in |x|^2 - 2<x, y> + |y|^2. Values are scaled to the spread of the
    keys and count for a quarter. Points are computed when they are used, because all of them
    together would be as large as the cache.

    Args:
        slots: ``[batch, heads, n, ...]``, R = batch x heads.
        live: ``[R, n]``, in the dtype of the points, 1 for slots that are grouped, else 0.
    """

    def __init__(self, slots: Slots, live: Tensor) -> None:
        (self._keys, self._step), (self._values, step) = map(flat_rows, (slots.keys, slots.values))
        if step != self._step:
            self._keys, self._step = flat_rows(slots.keys.contiguous())
            self._values, _ = flat_rows(slots.values.contiguous())
        share = live
        if slots.mass is not None:
            mass = slots.mass.to(live.dtype).flatten(0, 1)
            per_mass = torch.where(mass > 0, mass, 1.0).reciprocal_()
            share = live * per_mass
        else:
            per_mass = torch.ones_like(live)
        count = live.sum(1, keepdim=True).clamp_(min=1)
        self._key_mean, spread = _moments(slots.keys.flatten(0, 1), live, count)
        self.dim = slots.keys.shape[3] + slots.values.shape[3]
        value_mean, value_spread = _moments(slots.values.flatten(0, 1), share, count)
        scale = _VALUES**0.5 * spread / value_spread.clamp_(min=1e-30)
        scale = scale.to(live.dtype)
        self._value_mean = value_mean * scale
        self._share = (per_mass * scale).flatten()  # the factor of a value

    def blocks(self, row: Tensor, places: Tensor, step: int) -> Iterator[Tensor]:
        parts = (torch.split(x, step) for x in (row, places))
        for of, mine in zip(*parts, strict=True):
            points = self._share.new_empty(*mine.shape, self.dim)
            self._form(of, mine, points)
            yield points

    def formed(self, row: Tensor, places: Tensor) -> Tensor:
        """The points of some rows (int64 ``[R']``) at the given places (``[R', m]``)."""
        points: Tensor = self._share.new_empty(*places.shape, self.dim)
        for start in range(0, places.shape[1], _COLUMNS):
            part = slice(start, start + _COLUMNS)
            self._form(row, places[:, part], points[:, part])
        return points

    def _form(self, row: Tensor, places: Tensor, out: Tensor) -> None:
        """Write the points at ``places`` of the rows ``row`` into ``out``."""
        dim, width = self._key_mean.shape[1], len(self._share) // len(self._key_mean)
        # Turn places in the tensors of the slots into columns of the table of all rows.
        column = places + ((width - self._step) * row).unsqueeze(1)
        weight = self._share.index_select(0, column.flatten()).view(*places.shape, 1)
        torch.sub(_rows(self._keys, places), self._key_mean[row].unsqueeze(1), out=out[..., :dim])
        values = _rows(self._values, places).to(weight.dtype)
        torch.addcmul(-self._value_mean[row].unsqueeze(1), values, weight, out=out[..., dim:])


Points = Given | KeysAndValues


def _rows(flat: Tensor, places: Tensor) -> Tensor:
    return flat.index_select(0, places.flatten()).view(*places.shape, flat.shape[1])


def _moments(x: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of x times weight, ``[R, d]``, and the norm of the differences from it, float64
    ``[R, 1]``.

    Args:
        x: ``[R, n, d]``.
        weight: ``[R, n]``.
        count: the number of live slots, ``[R, 1]``.
    """
    mean = torch.matmul(weight.unsqueeze(1), x.to(weight.dtype)).squeeze(1) / count
    size = (torch.linalg.vector_norm(x, dim=-1, dtype=weight.dtype) * weight).double()
    rest = size.square().sum(1, keepdim=True) - count * mean.double().square().sum(1, keepdim=True)
    return mean, rest.clamp_(min=0.0).sqrt_()
