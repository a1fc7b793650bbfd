"""Exchanges some slots of parts in few bits for others. All the rest keep their bits, and are not
read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.page.fields import COLUMNS, EMPTY, NEW, fields_of
from kvsketch.page.part import Part
from kvsketch.page.quantized import Quantized, coded, distance
from kvsketch.page.ragged import Blocks
from kvsketch.slots import Slots

#: New slots may be so many times as far from the centre as the unit says. A few are often twice as
#: far as all slots on average, and ``quantize`` would not enlarge the unit because of them.
FAR = 4.0

_Of = Callable[[Part], Tensor]


class Lowest:
    """The slots of the lowest score of every head of parts in few bits, such as those of several
    layers: what is small is computed for all of them at once.

    Args:
        parts: in few bits, with scores, of the same heads, channels, bits and fields.
        count: how many of each head, int64 ``[rows of all parts, heads]``, at most what it holds.

    Attributes:
        slots: in float32, ``[rows of all parts, heads, most, ...]``; dead where a head has fewer.
    """

    def __init__(self, parts: Sequence[Part], count: Tensor) -> None:
        # At least one column, which is dead where nothing is exchanged but only added.
        self._parts, self._count, most = parts, count, max(1, int(count.max()))
        start, self._held = (_cat([part.spans()[i] for part in parts]) for i in (0, 1))
        lengths = [_rows(part.packed["keys"].codes, part).shape[0] // part.batch for part in parts]
        column = torch.arange(max(part.count for part in parts), device=start.device)
        there = column < self._held.unsqueeze(-1)
        # The place of each slot in the tensors of its part with one row per slot.
        at = (start + self._row_starts(lengths)).unsqueeze(-1) + column
        self._at = at = torch.where(there, at, 0)
        score = self._chosen(at, _field("score")).masked_fill_(~there, torch.inf)
        index = score.topk(most, largest=False).indices
        real = torch.arange(most, device=at.device) < count.unsqueeze(-1)
        taken = torch.zeros_like(there).scatter_(2, index, real)
        self._rest = there & ~taken
        some = at.gather(2, index)
        self._few = {name: self._some_packed(some, name) for name in parts[0].packed}
        fields = {name: self._chosen(some, _field(name)) for name in parts[0].fields}
        found = Part.over(fields, self._few, (len(some), some.shape[1], most)).read(torch.float32)
        self.slots = found if bool(real.all()) else found.only(real)

    def _row_starts(self, lengths: Sequence[int]) -> Tensor:
        """Where each row starts in the tensors of its part, whose rows have these lengths, int64
        ``[rows of all parts, 1]``."""
        device, each = self._held.device, zip(self._parts, lengths, strict=True)
        starts = [torch.arange(part.batch, device=device) * length for part, length in each]
        return _cat(starts).unsqueeze(1)

    def _split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The rows of each part."""
        return torch.split(tensor, [part.batch for part in self._parts])

    def _chosen(self, at: Tensor, of: _Of) -> Tensor:
        """The slots at some places of a tensor of every part."""
        found = []
        for part, place in zip(self._parts, self._split(at), strict=True):
            rows = _rows(of(part), part)
            found.append(rows.index_select(0, place.flatten()).view(*place.shape, *rows.shape[1:]))
        return _cat(found)

    def _some_packed(self, at: Tensor, name: str) -> Quantized:
        """The keys or values at some places, with the centres and units of all parts."""
        each = [part.packed[name] for part in self._parts]
        offsets = [one.offset for one in each if one.offset is not None]
        return replace(
            each[0],
            codes=self._chosen(at, lambda part: part.packed[name].codes),
            step=self._chosen(at, lambda part: part.packed[name].step),
            unit=_cat([one.unit for one in each]),
            offset=_cat(offsets) if offsets else None,
        )

    def exchanged(self, new: Slots, sizes: Tensor) -> list[Part | None]:
        """The parts with others instead of these slots: in their places if they are as many, else
        after all the rest.

        Args:
            new: in float32, ``[rows of all parts, heads, n, ...]``, each head's own first.
            sizes: how many these are, int64 ``[rows of all parts, heads]``.

        Returns:
            None for a part whose new keys or values are too far from its others for their common
            unit, which ``quantize`` would enlarge.
        """
        own = torch.arange(new.count, device=sizes.device) < sizes.unsqueeze(-1)
        fits = torch.ones(len(sizes), dtype=torch.bool, device=sizes.device)
        few, fields = {}, fields_of(new)
        for name, before in self._few.items():
            x, unit, offset = fields.pop(name).float(), before.unit, before.offset
            fits &= ~(distance(x, offset, own, offset is not None) > FAR * unit).flatten(1).any(1)
            few[name] = coded(x, before.bits, offset, unit, own)
        found: list[Part | None] = []
        stop = 0
        for part in self._parts:
            start, stop = stop, stop + part.batch
            rows = operator.itemgetter(slice(start, stop))
            if not bool(rows(fits).all()):
                found.append(None)
                continue
            packed = {name: one.map(rows) for name, one in few.items()}
            columns = {name: rows(tensor) for name, tensor in fields.items()}
            places = rows(self._at), rows(self._rest), rows(own)
            found.append(_exchanged(part, *places, packed, columns))
        return found


def _exchanged(
    part: Part,
    at: Tensor,
    rest: Tensor,
    own: Tensor,
    packed: dict[str, Quantized],
    columns: dict[str, Tensor],
) -> Part:
    """A part with others instead of some slots.

    Args:
        at: the places of its slots in its tensors with one row per slot, int64 ``[batch, heads,
            ...]``.
        rest: which of them it keeps, bool.
        own: which of the others are slots, bool ``[batch, heads, n]``.
        packed, columns: the others.
    """
    kept = rest.sum(-1)
    held, before = kept + own.sum(-1), part.spans()[1]
    some = own.flatten().nonzero().squeeze(1)
    blocks, lead, source = part.blocks, tuple(part.lead[0]), None
    if torch.equal(held, before):  # the others take the places of these
        there = torch.arange(at.shape[2], device=at.device) < before.unsqueeze(-1)
        (come,) = _where(there & ~rest, at)
    else:
        blocks = None if bool((held == held.max()).all()) else Blocks(held)
        start, lead = _laid(part, held, blocks)
        # For every slot of the new tensors, its place among the old ones.
        source = torch.zeros(math.prod(lead), dtype=torch.int64, device=at.device)
        source.index_copy_(0, *_where(rest, start + rest.cumsum(-1) - 1, at))
        column = torch.arange(own.shape[2], device=at.device)
        (come,) = _where(own, start + kept.unsqueeze(-1) + column)

    def joined(old: Tensor, others: Tensor) -> Tensor:
        rows, others, shape = _rows(old, part), others.flatten(0, 2), old.shape[len(part.lead[0]) :]
        if shape.numel() == 1:  # numbers are moved faster than rows
            rows, others = rows.flatten(), others.flatten()
        new = rows.clone() if source is None else rows.index_select(0, source)
        new.index_copy_(0, come, others.index_select(0, some).to(old.dtype))
        return new.view(*lead, *shape)

    def column_of(name: str) -> Tensor:
        old = part.fields[name] if name in part.fields else part.filled(name)
        others = columns.get(name)
        if others is None:
            others = old.new_full(own.shape, NEW[name])
        found = joined(old, others)
        if name in EMPTY and blocks is not None:
            found.view(-1, blocks.size).masked_fill_(~blocks.live(), EMPTY[name])
        return found

    most = int(held.max())
    few = {}
    for name, old in part.packed.items():
        codes, step = (joined(getattr(old, n), getattr(packed[name], n)) for n in ("codes", "step"))
        few[name] = replace(old, count=most, codes=codes, step=step)
    fields = {n: column_of(n) for n in COLUMNS if n in part.fields or n in columns}
    shape = (part.batch, part.heads, most)
    return Part.over(fields, few, shape, None if blocks is None else held, blocks)


def _laid(part: Part, held: Tensor, blocks: Blocks | None) -> tuple[Tensor, tuple[int, ...]]:
    """Where each head of new sizes starts in tensors with one row per slot, int64 ``[batch, heads,
    1]``, and the axes of the tensors before the channels."""
    batch, heads, most = part.batch, part.heads, int(held.max())
    if blocks is None:
        start, length = torch.arange(heads, device=held.device) * most, heads * most
        lead: tuple[int, ...] = (batch, heads, most)
    else:
        start, length = blocks.layout.start, blocks.layout.total
        lead = (batch, length)
    row = torch.arange(batch, device=held.device).unsqueeze(1) * length
    return (start + row).unsqueeze(-1), lead


def _field(name: str) -> _Of:
    return lambda part: part.fields[name]


def _where(true: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The numbers of tensors where a tensor of their shape is true, in fewer steps than by indexing
    each of them with it."""
    places = true.flatten().nonzero().squeeze(1)
    return [tensor.expand_as(true).flatten().index_select(0, places) for tensor in tensors]


def _rows(tensor: Tensor, part: Part) -> Tensor:
    """A tensor of slots with one row per slot, of all heads."""
    return tensor.flatten(0, 1 if part.layout is not None else 2)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
