"""Groups of slots, and merging each group into one slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.slots import Slots, flat_rows


@dataclass(frozen=True)
class Groups:
    """A grouping of n slots per head into ``count`` groups.

    Attributes:
        index: the group of each slot, int64 ``[R, n]``, R = batch x heads.
        count: the number of groups in the row that has most. Some groups may be empty.
    """

    index: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Sums over groups: ``[R, n, d]`` to ``[R, count, d]``."""
        shape = (values.shape[0], self.count, values.shape[2])
        index = self.index.unsqueeze(-1).expand_as(values)
        return values.new_zeros(shape).scatter_add_(1, index, values)


def merge(
    slots: Slots,
    groups: Groups,
    weight: Tensor,
    attended: bool = False,
    chosen: Tensor | None = None,
    ahead: Tensor | None = None,
    width: int | None = None,
) -> Slots:
    """Merge each group into one slot with the weighted mean of the keys and the sums of u and m.

    The result is in the order of the groups' first members. The slot of a group of one is
    unchanged. Empty groups become dead slots, at the end.

    Args:
        slots: ``[batch, heads, N, ...]``.
        groups: a grouping of n slots.
        weight: float ``[R, n]``, > 0 for every live slot and 0 for the others.
        attended: whether u is the weighted mean of the values u / m, times the mass of the group,
            instead of the sum of u. This is better if the weight is the attention that slots get,
            because the sum is right only for a query that attends to all members alike.
        chosen: the slots that are grouped, int64 ``[R, n]``, ascending. None: all.
        ahead: bool ``[R, N]``: other slots, which stay unchanged and come first. None: none.
        width: slots of the result, for groups and those of ``ahead``. None: as many as groups.
    """
    batch, heads = slots.keys.shape[:2]
    rows, n = weight.shape
    device = weight.device
    width = groups.count if width is None else width
    live, column = weight > 0, torch.arange(n, device=device)
    row = torch.arange(rows, device=device).unsqueeze(1)
    chosen = column.expand(rows, n) if chosen is None else chosen
    start = torch.full((rows, groups.count), n, device=device)
    start.scatter_reduce_(1, groups.index, torch.where(live, column, n), "amin")
    lead = start.gather(1, groups.index)  # the first member of each slot's group
    first = (lead == column) & live

    # The slot from which each place of the result is taken, before merging.
    number = first.cumsum(1) - 1
    source = chosen.new_zeros(rows, width + 1)
    if ahead is not None:
        place = ahead.cumsum(1)
        number += place[:, -1:]
        every = torch.arange(slots.count, device=device).expand(rows, -1)
        source.scatter_(1, torch.where(ahead, place - 1, width), every)
    source.scatter_(1, torch.where(first, number, width), chosen)
    slots = slots if slots.mass is not None else replace(slots, mass=slots.masses())
    kept = slots.take(source[:, :width].view(batch, heads, width))
    real = torch.arange(width, device=device) <= number[:, -1:]
    if not bool(real.all()):
        dead = ~real.view(batch, heads, width)
        kept = kept.map(lambda t: t.masked_fill_(dead.view(*dead.shape, *[1] * (t.dim() - 3)), 0))

    # Groups of two or more, in order, and all of their members.
    lead = (lead + n * row).flatten()
    later = (live & ~first).flatten()
    grown = torch.zeros_like(later)
    grown[lead[later]] = True
    member, grown = (grown | later).nonzero().squeeze(1), grown.nonzero().squeeze(1)
    group = torch.searchsorted(grown, lead[member])
    weight, origin = weight.flatten()[member], chosen.flatten()[member]
    head, target = member // n, (number + width * row).flatten()[grown]

    def members(field: Tensor) -> Tensor:
        flat, step = flat_rows(field)
        some = flat.index_select(0, head * step + origin).to(weight.dtype)
        return some if some.dim() == 2 else some.unsqueeze(1)

    def sums(values: Tensor) -> Tensor:
        out = values.new_zeros(len(grown), values.shape[1])
        return out.scatter_add_(0, group.unsqueeze(1).expand_as(values), values)

    weight = weight.unsqueeze(1)
    total = sums(weight)

    def mean(values: Tensor) -> Tensor:
        return sums(values * weight).div_(total)

    assert slots.mass is not None
    mass, values = members(slots.mass), members(slots.values)
    fields = {"mass": sums(mass), "keys": mean(members(slots.keys))}
    if attended:
        fields["values"] = mean(values / torch.where(mass > 0, mass, 1.0)) * fields["mass"]
    else:
        fields["values"] = sums(values)
    if slots.positions is not None:
        fields["positions"] = mean(members(slots.positions))
    if slots.score is not None:
        fields["score"] = sums(members(slots.score))
    for name, new in fields.items():
        field: Tensor = getattr(kept, name)
        new = (new if field.dim() == 4 else new.squeeze(1)).to(field.dtype)
        field.flatten(0, 2).index_copy_(0, target, new)
    return kept


def packed(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns where ``mask`` (bool ``[R, n]``) is True, ascending, in ``width`` columns, and
    which of these exist (bool), ``[R, width]`` each."""
    count = mask.sum(1, keepdim=True)
    real = torch.arange(width, device=mask.device) < count
    column = mask.nonzero()[:, 1]
    if len(column) == real.numel():
        return column.view(real.shape), real
    out = column.new_zeros(real.shape)
    out[real] = column
    return out, real
