"""Exchanges some slots of a part in few bits for others. All the rest keep their bits, and are not
read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.page.fields import COLUMNS, EMPTY, NEW, fields_of
from kvsketch.page.part import Part
from kvsketch.page.quantized import coded, distance
from kvsketch.page.ragged import Blocks
from kvsketch.slots import Slots


class Lowest:
    """The slots of the lowest score of every head of a part in few bits.

    Args:
        part: in few bits, with scores.
        count: how many of each head, int64 ``[batch, heads]``, at most what it holds.

    Attributes:
        slots: in float32, ``[batch, heads, most, ...]``; dead where a head has fewer.
    """

    def __init__(self, part: Part, count: Tensor) -> None:
        # At least one column, which is dead where nothing is exchanged but only added.
        self._part, self._count, most = part, count, max(1, int(count.max()))
        start, self._held = part.spans()
        row = torch.arange(part.batch, device=start.device).view(-1, 1, 1)
        column = torch.arange(part.count, device=start.device)
        there = column < self._held.unsqueeze(-1)
        total = _rows(part.fields["score"], part).shape[0] // part.batch
        # The place of each slot in the tensors with one row per slot.
        at = row * total + start.unsqueeze(-1) + column
        self._at = at = torch.where(there, at, 0)
        score = _rows(part.fields["score"], part)[at].masked_fill_(~there, torch.inf)
        index = score.topk(most, largest=False).indices
        real = torch.arange(most, device=at.device) < count.unsqueeze(-1)
        taken = torch.zeros_like(there).scatter_(2, index, real)
        self._rest = there & ~taken
        some = at.gather(2, index)

        def chosen(tensor: Tensor) -> Tensor:
            rows = _rows(tensor, part)
            return rows.index_select(0, some.flatten()).view(*some.shape, *rows.shape[1:])

        few = {name: one.map_slots(chosen) for name, one in part.packed.items()}
        fields = {name: chosen(tensor) for name, tensor in part.fields.items()}
        found = Part.over(fields, few, (part.batch, part.heads, most)).slots
        self.slots = found if bool(real.all()) else found.only(real)

    def exchanged(self, new: Slots, sizes: Tensor) -> Part | None:
        """The part with others instead of these slots, after all the rest.

        Args:
            new: in float32, ``[batch, heads, n, ...]``, each head's own first.
            sizes: how many these are, int64 ``[batch, heads]``.

        Returns:
            None: keys or values are too far from the others for their common unit, which
            ``quantize`` would enlarge.
        """
        part, device = self._part, self._at.device
        own = torch.arange(new.count, device=device) < sizes.unsqueeze(-1)
        few, fields = {}, fields_of(new)
        for name, before in part.packed.items():
            x, unit, offset = fields.pop(name).float(), before.unit, before.offset
            if bool((distance(x, offset, own, offset is not None) > 2 * unit).any()):
                return None
            few[name] = coded(x, before.bits, offset, unit, own)
        kept = self._held - self._count
        held = kept + sizes
        most = int(held.max())
        even = bool((held == most).all())
        blocks = None if even else Blocks(held)
        # For every row of the new tensors, that among the old ones followed by the new slots.
        if blocks is None:
            length = part.heads * most
            start = torch.arange(part.heads, device=device).expand(part.batch, -1) * most
        else:
            length, start = blocks.layout.total, blocks.layout.start
        row = torch.arange(part.batch, device=device).view(-1, 1, 1) * length
        start = row + start.unsqueeze(-1)
        source = torch.zeros(part.batch * length, dtype=torch.int64, device=device)
        target = start + self._rest.cumsum(-1) - 1
        source[target[self._rest]] = self._at[self._rest]
        column = torch.arange(new.count, device=device)
        target = start + kept.unsqueeze(-1) + column
        every = torch.arange(own.numel(), device=device).view(own.shape)
        source[target[own]] = every[own] + _rows(part.packed["keys"].codes, part).shape[0]
        lead = (part.batch, part.heads, most) if even else (part.batch, length)

        def joined(old: Tensor, others: Tensor) -> Tensor:
            rows = torch.cat([_rows(old, part), others.flatten(0, 2).to(old.dtype)])
            return rows.index_select(0, source).view(*lead, *rows.shape[1:])

        def column_of(name: str) -> Tensor:
            old, others = part.fields.get(name), fields.get(name)
            if old is None or others is None:
                like = others if old is None else old
                assert like is not None
                old = part.filled(name) if old is None else old
                others = like.new_full(own.shape, NEW[name]) if others is None else others
            found = joined(old, others)
            if name in EMPTY and blocks is not None:
                found.view(-1, blocks.size).masked_fill_(~blocks.live(), EMPTY[name])
            return found

        packed = {}
        for name, old in part.packed.items():
            others = few[name]
            packed[name] = replace(
                old,
                count=most,
                codes=joined(old.codes, others.codes),
                low=joined(old.low, others.low),
                step=joined(old.step, others.step),
            )
        names = [name for name in COLUMNS if name in part.fields or name in fields]
        columns = {name: column_of(name) for name in names}
        shape = (part.batch, part.heads, most)
        return Part.over(columns, packed, shape, None if even else held, blocks)


def _rows(tensor: Tensor, part: Part) -> Tensor:
    """A tensor of slots with one row per slot, of all heads."""
    return tensor.flatten(0, 1 if part.layout is not None else 2)
