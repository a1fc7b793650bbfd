"""A budget for each head, in one call: what ``Compressor.compress`` does with a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..random_numbers import places
from ..slots import Slots
from .seen import Seen

if TYPE_CHECKING:
    from .base import Compressor


@dataclass(frozen=True)
class _Layout:
    """What becomes of each head, all int64 ``[batch, heads]``.

    Attributes:
        live: live slots.
        own: slots it has afterwards.
        first: of these, kept from the start.
        middle: slots that what lies between is reduced to; 0: nothing is reduced.
        last: kept from the end.
        order: places of the slots, live ones first, int64 ``[batch, heads, n]``; None: as they are.
    """

    live: Tensor
    own: Tensor
    first: Tensor
    middle: Tensor
    last: Tensor
    order: Tensor | None

    @staticmethod
    def of(slots: Slots, budget: Tensor, sink: int, recent: int) -> _Layout:
        n, live = slots.count, slots.live()
        budget = budget.clamp(max=n)
        count = torch.full_like(budget, n) if live is None else live.sum(-1)
        whole = budget >= count
        first = torch.where(whole, count, budget.clamp(max=sink))
        last = torch.where(whole, 0, (budget - first).clamp(max=recent))
        middle = torch.where(whole, 0, budget - first - last)
        order = None
        if live is not None:
            order = live.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            # all of a head that keeps everything, dead ones included, where it is
            everything = budget == n
            column = torch.arange(n, device=order.device)
            order = torch.where(everything.unsqueeze(-1), column, order)
            count, first = (torch.where(everything, n, t) for t in (count, first))
        return _Layout(count, first + middle + last, first, middle, last, order)

    def place(self, column: Tensor) -> Tensor:
        """Where the live slots of these numbers (``[..., columns]``) are."""
        if self.order is None:
            return column.expand(*self.own.shape, column.shape[-1])
        return self.order.gather(-1, column.expand(*self.own.shape, column.shape[-1]))


def compress_ragged(
    compressor: Compressor, slots: Slots, budget: Tensor, sink: int, recent: int, seen: Seen | None
) -> Slots:
    """``Compressor.compress`` with a budget for each head. A head keeps what it would keep alone,
    without padding: only heads that have something to lose are reduced at all.

    Args:
        slots: ``[batch, heads, n, ...]``, scored.
        budget: int64 ``[batch, heads]``, >= 1, some less than n.
        seen: of all heads.
    """
    layout = _Layout.of(slots, budget.to(slots.keys.device), sink, recent)
    width = min(int(budget.max()), slots.count)
    column = torch.arange(width, device=slots.keys.device)
    own = column < layout.own.unsqueeze(-1)
    # Behind first and middle come the last ones.
    end = (layout.first + layout.middle).unsqueeze(-1)
    skipped = (layout.live - layout.own).unsqueeze(-1)
    kept = slots.take(layout.place(torch.where(column < end, column, column + skipped) * own))
    reduced = layout.middle > 0
    if bool(reduced.any()):
        some = _reduced(compressor, slots, layout, reduced, sink, recent, seen)
        kept = _overlaid(kept, some, layout.middle, sink)
    if bool(own.all()):
        return kept
    if kept.mass is None:
        kept = Slots(**{**kept.tensors(), "mass": kept.masses()})
    return kept.map(lambda t: t.masked_fill(~own.view(*own.shape, *[1] * (t.dim() - 3)), 0))


def _reduced(
    compressor: Compressor,
    slots: Slots,
    layout: _Layout,
    reduced: Tensor,
    sink: int,
    recent: int,
    seen: Seen | None,
) -> Slots:
    """What lies between sinks and recent window, reduced, in the heads that need it; the others'
    means nothing: ``[batch, heads, most, ...]``."""
    batch, heads, n = slots.keys.shape[:3]
    size = layout.live - sink - recent  # of those that are reduced, above the budget
    if bool(reduced.all()) and layout.order is None and compressor.ragged:
        return compressor.reduce(slots.narrow(sink, n - sink - recent), layout.middle, seen)
    device = slots.keys.device
    numbers = torch.arange(batch) if compressor.rows is None else compressor.rows
    place = places(numbers.to(device), heads).view(-1, 1)
    rows = reduced.flatten().nonzero().squeeze(1)
    budgets, sizes = (t.flatten()[rows] for t in (layout.middle, size))
    flat = slots.map(lambda t: t.flatten(0, 1).unsqueeze(1))
    order = None if layout.order is None else layout.order.flatten(0, 1).unsqueeze(1)

    def between(some: Tensor, size: Tensor) -> Slots:
        most = int(size.max())
        part = flat.map(lambda t: t.index_select(0, some))
        if order is None:
            return part.narrow(sink, most)
        part = part.take(order.index_select(0, some)[..., sink : sink + most])
        real = torch.arange(most, device=device) < size.view(-1, 1, 1)
        return part if bool(real.all()) else part.only(real)

    def mine(some: Tensor) -> Seen | None:
        return None if seen is None else seen.select(some)

    if compressor.ragged:
        twin = compressor.at(place[rows], compressor.generator)
        parts = [(rows, twin.reduce(between(rows, sizes), budgets.unsqueeze(1), mine(rows)))]
    else:
        parts, generator = [], compressor.generator
        both = torch.stack([budgets, sizes], 1)
        alike, number = torch.unique(both, dim=0, return_inverse=True)
        for i, (budget, _) in enumerate(alike.tolist()):
            some = (number == i).nonzero().squeeze(1)
            # every head draws what it would draw if all had its budget
            generator = compressor.generator.clone_state()
            twin = compressor.at(place[rows[some]], generator)
            middle = between(rows[some], sizes[some])
            parts.append((rows[some], twin.reduce(middle, budget, mine(rows[some]))))
        compressor.generator.set_state(generator.get_state())
    return _spread(parts, batch, heads, int(budgets.max()))


def _spread(parts: list[tuple[Tensor, Slots]], batch: int, heads: int, width: int) -> Slots:
    """Rows of several reductions at their heads' places; the rest is 0."""
    names = {name for _, part in parts for name in part.tensors()}
    found = {}
    for name in sorted(names):
        whole: Tensor | None = None
        for rows, part in parts:
            field = part.masses() if name == "mass" else getattr(part, name)
            if whole is None:
                whole = field.new_zeros(batch * heads, width, *field.shape[3:])
            whole[rows, : part.count] = field.squeeze(1)
        assert whole is not None
        found[name] = whole.view(batch, heads, *whole.shape[1:])
    return Slots(**found)


def _overlaid(kept: Slots, some: Slots, count: Tensor, start: int) -> Slots:
    """``kept``, which is overwritten, with the first ``count`` (``[batch, heads]``) slots of
    ``some`` from ``start`` on."""
    width = some.count
    mine = torch.arange(width, device=count.device) < count.unsqueeze(-1)

    def field(slots: Slots, name: str) -> Tensor:
        tensor: Tensor | None = slots.masses() if name == "mass" else getattr(slots, name)
        return torch.zeros_like(slots.masses()) if tensor is None else tensor

    fields = {name: field(kept, name) for name in {**kept.tensors(), **some.tensors()}}
    for name, below in fields.items():
        part = below.narrow(2, start, width)
        here = mine.view(*mine.shape, *[1] * (part.dim() - 3))
        part.copy_(torch.where(here, field(some, name), part))
    return Slots(**fields)
