"""Compression with a budget for each head: ``Compressor.compress`` with a tensor of budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvsketch.random_numbers import places
from kvsketch.slots import Slots


class Reducer(Protocol):
    """What is used of a ``Compressor``; its attributes and methods are described there."""

    rows: Tensor | None
    generator: torch.Generator

    @property
    def ragged(self) -> bool: ...

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots: ...

    def at(self, places: Tensor, generator: torch.Generator) -> Reducer: ...


@dataclass(frozen=True)
class _Layout:
    """The numbers of slots of each head, all int64 ``[batch, heads]``.

    Attributes:
        live: live slots before the compression.
        own: slots after the compression.
        first: slots that are kept from the start.
        middle: slots to which those between start and end are reduced. 0: nothing is reduced.
        last: slots that are kept from the end.
        order: the places of the slots, live ones first, int64 ``[batch, heads, n]``. None: the
            slots are in this order already.
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
            # A head that keeps everything also keeps its dead slots, all in their places.
            everything = budget == n
            column = torch.arange(n, device=order.device)
            order = torch.where(everything.unsqueeze(-1), column, order)
            count, first = (torch.where(everything, n, t) for t in (count, first))
        return _Layout(count, first + middle + last, first, middle, last, order)

    def place(self, column: Tensor) -> Tensor:
        """The places of the live slots with these numbers (``[..., columns]``)."""
        if self.order is None:
            return column.expand(*self.own.shape, column.shape[-1])
        return self.order.gather(-1, column.expand(*self.own.shape, column.shape[-1]))


def compress_ragged(
    compressor: Reducer, slots: Slots, budget: Tensor, sink: int, recent: int, asked_again: bool
) -> Slots:
    """``Compressor.compress`` with a budget for each head. The result for a head is the same as if
    it were compressed alone and without padding. Only heads with more live slots than their budget
    are reduced.

    Args:
        slots: ``[batch, heads, n, ...]``, with scores.
        budget: int64 ``[batch, heads]``, >= 1, some less than n.
        asked_again: as for ``reduce``.
    """
    layout = _Layout.of(slots, budget.to(slots.keys.device), sink, recent)
    width = min(int(budget.max()), slots.count)
    column = torch.arange(width, device=slots.keys.device)
    own = column < layout.own.unsqueeze(-1)
    # The last slots come after those of first and middle.
    end = (layout.first + layout.middle).unsqueeze(-1)
    skipped = (layout.live - layout.own).unsqueeze(-1)
    kept = slots.take(layout.place(torch.where(column < end, column, column + skipped) * own))
    reduced = layout.middle > 0
    if bool(reduced.any()):
        some = _reduced(compressor, slots, layout, reduced, sink, recent, asked_again)
        kept = _overlaid(kept, some, layout.middle, sink)
    if bool(own.all()):
        return kept
    if kept.mass is None:
        kept = Slots(**{**kept.tensors(), "mass": kept.masses()})
    return kept.map(lambda t: t.masked_fill(~own.view(*own.shape, *[1] * (t.dim() - 3)), 0))


def _reduced(
    compressor: Reducer,
    slots: Slots,
    layout: _Layout,
    reduced: Tensor,
    sink: int,
    recent: int,
    asked_again: bool,
) -> Slots:
    """The slots between sinks and recent window after reduction, ``[batch, heads, most, ...]``.
    They are undefined for heads that need no reduction."""
    batch, heads, n = slots.keys.shape[:3]
    size = layout.live - sink - recent  # slots that may be reduced
    if bool(reduced.all()) and layout.order is None and compressor.ragged:
        return compressor.reduce(slots.narrow(sink, n - sink - recent), layout.middle, asked_again)
    device = slots.keys.device
    numbers = torch.arange(batch, device="cpu") if compressor.rows is None else compressor.rows
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

    if compressor.ragged:
        twin = compressor.at(place[rows], compressor.generator)
        parts = [(rows, twin.reduce(between(rows, sizes), budgets.unsqueeze(1), asked_again))]
    else:
        parts, generator = [], compressor.generator
        both = torch.stack([budgets, sizes], 1)
        alike, number = torch.unique(both, dim=0, return_inverse=True)
        for i, (budget, _) in enumerate(alike.tolist()):
            some = (number == i).nonzero().squeeze(1)
            # Every head gets the random numbers that it would get if all heads had its budget.
            generator = compressor.generator.clone_state()
            twin = compressor.at(place[rows[some]], generator)
            middle = between(rows[some], sizes[some])
            parts.append((rows[some], twin.reduce(middle, budget, asked_again)))
        compressor.generator.set_state(generator.get_state())
    return _spread(parts, batch, heads, int(budgets.max()))


def _spread(parts: list[tuple[Tensor, Slots]], batch: int, heads: int, width: int) -> Slots:
    """The rows of several reductions at the places of their heads, 0 for all other heads."""
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
    """Overwrite ``kept`` from column ``start`` on with the first ``count`` (``[batch, heads]``)
    slots of ``some``."""
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
