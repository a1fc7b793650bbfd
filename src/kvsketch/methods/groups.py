"""Groups of slots, and what each becomes: one slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..slots import Slots, flat_rows


@dataclass(frozen=True)
class Groups:
    """A grouping of n slots per head into ``count`` groups.

    Attributes:
        index: int64 ``[R, n]``, R = batch x heads.
        count: groups, of the row that has most; some may be empty.
    """

    index: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Sums over groups: ``[R, n, d]`` to ``[R, count, d]``."""
        shape = (values.shape[0], self.count, values.shape[2])
        index = self.index.unsqueeze(-1).expand_as(values)
        return values.new_zeros(shape).scatter_add_(1, index, values)


@dataclass(frozen=True)
class _Merge:
    """Where groups are: m slots in groups of two or more, g such groups.

    Attributes:
        first: bool ``[R, n]``: the first of its group.
        place: int64 ``[g]``: group number * in order of the first members, row by row of ``count``.
        member: int64 ``[m]``: places among the R x n slots.
        group: int64 ``[m]``: which of the g groups.
    """

    first: Tensor
    place: Tensor
    member: Tensor
    group: Tensor

    @staticmethod
    def of(groups: Groups, live: Tensor) -> _Merge:
        rows, n = live.shape
        column = torch.arange(n, device=live.device)
        start = groups.index.new_full((rows, groups.count), n)
        start.scatter_reduce_(1, groups.index, torch.where(live, column, n), "amin")
        mine = start.gather(1, groups.index)
        first = (mine == column) & live
        # A later member makes its group one of two or more.
        later = live & ~first
        row = torch.arange(rows, device=live.device).unsqueeze(1)
        grown = torch.zeros_like(live).flatten()
        lead = (mine + n * row).flatten()
        grown[lead[later.flatten()]] = True
        member = (grown | later.flatten()).nonzero().squeeze(1)
        leads = grown.nonzero().squeeze(1)
        number = (first.cumsum(1).sub_(1) + groups.count * row).flatten()
        return _Merge(first, number[leads], member, torch.searchsorted(leads, lead[member]))


def merge(
    slots: Slots,
    groups: Groups,
    weight: Tensor,
    attended: bool = False,
    chosen: Tensor | None = None,
) -> Slots:
    """One slot per group: the weighted mean key, the sum of u and of m; in the order of the groups'
    first members. A group of one is what it was. Empty groups become dead slots, at the end.

    Args:
        slots: ``[batch, heads, N, ...]``.
        groups: of n slots.
        weight: float ``[R, n]``, > 0 for every live slot and 0 for the others.
        attended: weigh values (u / m) like keys and multiply by the group's mass, instead of
            summing u: better if the weight is the attention that slots get, since the sum is right
            for a query that looks at all members alike.
        chosen: which slots are grouped, int64 ``[R, n]``, rising; None: all.
    """
    batch, heads = slots.keys.shape[:2]
    rows = batch * heads
    found = _Merge.of(groups, weight > 0)
    first, real = packed(found.first, groups.count)
    if chosen is not None:
        first = chosen.gather(1, first)
    slots = Slots(**{**slots.tensors(), "mass": slots.masses()})
    kept = slots.take(first.view(batch, heads, -1))
    if not bool(real.all()):
        mask = real.view(batch, heads, -1)
        kept = kept.map(lambda t: t * mask.view(*mask.shape, *[1] * (t.dim() - 3)).to(t.dtype))
    mine = weight.flatten()[found.member]
    total = mine.new_zeros(len(found.place)).scatter_add_(0, found.group, mine)
    row = found.member // weight.shape[1]
    column = found.member - row * weight.shape[1]
    if chosen is not None:
        column = chosen[row, column]

    def members(field: Tensor) -> Tensor:
        flat, step = flat_rows(field)
        some = flat.index_select(0, row * step + column).to(weight.dtype)
        return some if some.dim() == 2 else some.unsqueeze(1)

    def sums(values: Tensor) -> Tensor:
        out = values.new_zeros(len(found.place), values.shape[1])
        return out.scatter_add_(0, found.group.unsqueeze(1).expand_as(values), values)

    def mean(values: Tensor) -> Tensor:
        return sums(values * mine.unsqueeze(1)).div_(total.unsqueeze(1))

    assert slots.mass is not None
    mass = members(slots.mass)
    mass_sum = sums(mass)
    values = members(slots.values)
    if attended:
        values = mean(values / torch.where(mass > 0, mass, 1.0)) * mass_sum
    else:
        values = sums(values)
    fields: dict[str, Tensor] = {"mass": mass_sum, "values": values}
    how: dict[str, Callable[[Tensor], Tensor]] = {"keys": mean, "positions": mean, "score": sums}
    for name, fn in how.items():
        field = getattr(slots, name)
        if field is not None:
            fields[name] = fn(members(field))
    for name, new in fields.items():
        field = getattr(kept, name)
        new = new if field.dim() == 4 else new.squeeze(1)
        field.flatten(0, 2).index_copy_(0, found.place, new.to(field.dtype))
    return kept


def packed(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns where ``mask`` (bool ``[R, n]``) is True, rising, in ``width`` columns, and which
    of these there are (bool): ``[R, width]`` each."""
    count = mask.sum(1, keepdim=True)
    real = torch.arange(width, device=mask.device) < count
    column = mask.nonzero()[:, 1]
    if len(column) == real.numel():
        return column.view(real.shape), real
    out = column.new_zeros(real.shape)
    out[real] = column
    return out, real
