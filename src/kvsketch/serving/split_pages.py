"""Attention of one layer over pages in two parts: tokens that leave the window join the middle.

The window holds sinks, recent tokens and a buffer in the model's dtype. When it is full, at token
number sink + recent + buffer and every buffer tokens after it, the tokens between the sinks and the
recent window are compressed together with the slots of the middle. While all of them fit, all are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.middle import Middle
from kvsketch.cache.ragged import picked
from kvsketch.cache.storage import FULL
from kvsketch.cache.window import Windowed
from kvsketch.kernels.paged import over
from kvsketch.observed import Observed
from kvsketch.partial import NOTHING, partial, together
from kvsketch.serving.layout import Fields
from kvsketch.serving.pages import Pages
from kvsketch.serving.rhythm import Round
from kvsketch.serving.split_layout import SplitFields, SplitLayout
from kvsketch.slots import Slots


class SplitPages(Pages):
    """The pages of one layer.

    Args:
        layout: of a page. The other arguments are those of ``Pages``.
    """

    def __init__(self, layout: SplitLayout, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layout = layout
        # Middles without contents by number of requests: their offsets are computed once.
        self._of_rows: dict[int, Middle] = {}

    def _clear(self, pages: Tensor, fields: Fields) -> None:
        super()._clear(pages, fields)
        for part in self._split(fields).middle:
            part.index_fill_(0, pages, 0)

    def _others(self, packed: Tensor, now: Round, fields: Fields) -> list[tuple[Tensor, Tensor]]:
        if not now.compressed:
            return []
        middle = self._middle(fields, now.pages, now.runs)
        asked = Observed(packed, self.scaling, self.softcap)
        out, total = over(packed.to(fields.keys.dtype), middle, asked)
        return [(out.to(fields.keys.dtype), total)]

    def _compress(self, method: Windowed, pages: Tensor, fields: Fields, again: bool) -> None:
        sink, recent = method.sink, method.recent
        window, observed = self._full(pages, fields)
        window = replace(window, keys=window.keys.to(window.values.dtype))
        held, before = window, None
        if again:
            before = self._middle(fields, pages)
            first, rest = window.narrow(0, sink), window.narrow(sink, window.count - sink)
            held = Slots.cat([first, before.read(window.keys.dtype), rest])
            # Dead slots before the others, as left padding is.
            held = held.take(_alive(held).long().argsort(dim=-1, stable=True))
        sizes = torch.tensor(self.layout.sizes, device=pages.device).expand(len(pages), -1)
        after = self._reduced(method, held, sizes + (sink + recent), observed)
        alive = _alive(after)
        order, count = (~alive).long().argsort(dim=-1, stable=True), alive.sum(-1, keepdim=True)
        column = torch.arange(max(self.layout.sizes), device=pages.device)
        there = column < count - (sink + recent)
        place = order.gather(-1, (sink + column).clamp(max=after.count - 1).expand(there.shape))
        between = picked(after, place, there)
        if self.layout.bits == FULL:
            between = replace(between, keys=between.keys.to(fields.keys.dtype))
        middle = Middle(between, sizes, self.layout.bits, before)
        for part, new in zip(self._split(fields).middle, middle.contents(), strict=True):
            part.index_copy_(0, pages, new)
        self._slide(pages, fields, sink, recent)
        if after.score is not None and fields.score.shape[2]:
            number = torch.arange(sink + recent, device=pages.device)
            number = torch.where(number < sink, number, number + count - (sink + recent))
            score = after.score.gather(-1, order.gather(-1, number))
            fields.score[pages, :, : sink + recent] = score.float()
        if self.counts is not None:
            now = self._now(pages, fields, middle, observed, sink + recent)
            self._count(self.counts, observed, held, now)

    def _slide(self, pages: Tensor, fields: Fields, sink: int, recent: int) -> None:
        """Move the recent window next to the sinks and clear the slots after it."""
        end = self.rhythm.slots
        for part in (fields.keys, fields.values):
            part[pages, :, sink : sink + recent] = part[pages, :, end - recent :]
        fields.log_mass[pages, :, sink + recent :] = NOTHING

    def _now(
        self, pages: Tensor, fields: Fields, middle: Middle, observed: Observed, kept: int
    ) -> tuple[Tensor, Tensor]:
        """Attention of the last query over compressed pages, and the log of its total."""
        packed = self._last(observed, fields.keys.shape[1])
        found = [over(packed, middle, observed)]
        if kept:
            keys, values = (part[pages, :, :kept] for part in (fields.keys, fields.values))
            found.append(partial(packed, keys, values, None, self.scaling, self.softcap))
        return together(found)

    def _middle(self, fields: Fields, pages: Tensor, runs: Sequence[slice] | None = None) -> Middle:
        """The middle of some pages: a view if they are a single run and their heads have the same
        size, else a copy."""
        rows = len(pages)
        if rows not in self._of_rows:
            self._of_rows[rows] = self.layout.middle(rows, pages.device)
        parts, shell = self._split(fields).middle, self._of_rows[rows]
        if runs is not None and len(runs) == 1 and shell.blocks is None:
            return shell.of(part[runs[0]] for part in parts)
        return shell.of(part.index_select(0, pages) for part in parts)

    def _split(self, fields: Fields) -> SplitFields:
        assert isinstance(fields, SplitFields)
        return fields


def _alive(slots: Slots) -> Tensor:
    """bool ``[batch, heads, slots]``."""
    return slots.masses() != 0
