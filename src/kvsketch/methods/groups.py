"""Groups of slots, and what each becomes: one slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..slots import Slots


@dataclass(frozen=True)
class Groups:
    """A grouping of n slots per head into ``count`` groups.

    Attributes:
        index: int64 ``[R, n]``, R = batch x heads.
        count: groups; some may be empty.
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
) -> Slots:
    """One slot per group: the weighted mean key, the sum of u and of m; in the order of the groups'
    first members. Empty groups become dead slots, at the end.

    Args:
        slots: ``[batch, heads, n, ...]``.
        groups: of them.
        weight: float ``[R, n]``, > 0 for every live slot and 0 for the others.
        attended: weigh values (u / m) like keys and multiply by the group's mass, instead of
            summing u: better if the weight is the attention that slots get, since the sum is right
            for a query that looks at all members alike.
    """
    batch, heads, n = slots.keys.shape[:3]
    dtype = weight.dtype
    total = groups.sum(weight.unsqueeze(-1))
    safe = torch.where(total > 0, total, 1.0)
    mass = slots.masses().reshape(batch * heads, n, 1).to(dtype)
    mass_sum = groups.sum(mass)

    def mean(field: Tensor) -> Tensor:
        return groups.sum(field * weight.unsqueeze(-1)).div_(safe)

    flat = {k: t.reshape(batch * heads, n, -1).to(dtype) for k, t in slots.tensors().items()}
    if attended:
        values = flat["values"]
        if slots.mass is not None:
            values = values / torch.where(mass > 0, mass, 1.0)
        values = mean(values) * mass_sum
    else:
        values = groups.sum(flat["values"])
    fields = {"keys": mean(flat["keys"]), "values": values, "mass": mass_sum}
    if "positions" in flat:
        fields["positions"] = mean(flat["positions"])
    if "score" in flat:
        fields["score"] = groups.sum(flat["score"])
    order = torch.full((batch * heads, groups.count), n, device=weight.device)
    place = torch.arange(n, device=weight.device).expand(batch * heads, n)
    place = torch.where(weight > 0, place, n)
    order = order.scatter_reduce_(1, groups.index, place, "amin").argsort(-1)
    merged = {}
    for name, field in fields.items():
        like = getattr(slots, name) if name != "mass" else slots.masses()
        field = field.gather(1, order.unsqueeze(-1).expand_as(field))
        shape = (batch, heads, groups.count, *like.shape[3:])
        merged[name] = field.reshape(shape).to(like.dtype)
    return Slots(**merged)
