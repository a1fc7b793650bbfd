"""Sink + recent + compressed middle: written once, around any compressor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError
from ..slots import Observed, Slots
from .base import Compressor, check_input


class Windowed:
    """Keep the first ``sink`` and the last ``recent`` live tokens as they are and give the rest of
    the budget to ``compressor`` for what lies between.

    When the budget is smaller than ``sink + recent``, the sinks come first and the recent window
    takes what is left. Rows with fewer live tokens than others (left padding) are handled row by
    row: dead slots never count as sink or recent.

    Args:
        compressor: compresses the middle.
        sink: tokens kept from the start, >= 0.
        recent: tokens kept from the end, >= 0.

    Raises:
        InputError: sink or recent negative or not an int.
    """

    def __init__(self, compressor: Compressor, sink: int = 4, recent: int = 32) -> None:
        check_window(sink, recent)
        self.compressor = compressor
        self.sink = sink
        self.recent = recent

    #: a slot has both u and m, or neither
    split_sums = False

    @property
    def needs_queries(self) -> bool:
        return self.compressor.needs_queries

    @property
    def accumulates(self) -> bool:
        return self.compressor.accumulates

    @property
    def window(self) -> int | None:
        """How many of a prompt's last queries the method looks at; None: all of them."""
        return self.compressor.window

    def recent_at(self, budget: int) -> int:
        """Recent tokens that are kept as they are within a budget."""
        return min(self.recent, budget - min(self.sink, budget))

    def reset(self) -> None:
        """Forget what the method holds."""
        self.compressor.reset()
        self.compressor.rows = None

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Queries held for a fit belong to other rows now: forget them. Rows are numbered anew."""
        self.compressor.reset()
        self.compressor.rows = None

    def number_rows(self, rows: Tensor) -> None:
        """Say that the rows are part of a larger batch and which ones (int64 ``[batch]``): they
        then keep from here on what they would keep there."""
        self.compressor.rows = rows

    def tensors(self) -> list[Tensor]:
        """What the method holds."""
        return self.compressor.tensors()

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        return self.compressor.observe(slots, observed)

    def __call__(self, slots: Slots, budget: int, observed: Observed | None = None) -> Slots:
        """As ``Compressor.__call__``: at most ``budget`` slots per KV head."""
        check_input(slots, budget)
        if slots.count <= budget:
            return slots
        slots = self.compressor.observe(slots, observed)
        sink, recent = min(self.sink, budget), self.recent_at(budget)
        first, middle, last = split(slots, sink, recent)
        kept = budget - sink - recent
        if kept == 0:
            return Slots.cat([first, last])
        if middle.count > kept:
            middle = self.compressor.compress(middle, kept)
        return Slots.cat([first, middle, last])


def check_window(sink: object, recent: object) -> None:
    """Raise InputError unless both are ints >= 0."""
    for name, value in (("sink", sink), ("recent", recent)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name}={value!r} must be an int >= 0 (tokens kept as they are)")


def split(slots: Slots, sink: int, recent: int) -> tuple[Slots, Slots, Slots]:
    """First ``sink`` live slots, what lies between, last ``recent`` live slots, per row and head.

    Where a row has too few live slots the parts are filled up with dead ones.
    """
    n = slots.count
    live = slots.live()
    if live is None or bool(live.all()):
        return (
            slots.narrow(0, sink),
            slots.narrow(sink, n - sink - recent),
            slots.narrow(n - recent, recent),
        )
    # Dead slots first, live ones last in their old order: the recent window is then the end.
    order = live.to(torch.uint8).argsort(dim=-1, stable=True)
    slots, live = slots.take(order), live.gather(-1, order)
    start = n - live.sum(-1, keepdim=True)
    column = torch.arange(n, device=live.device)
    is_middle = live & (column >= start + sink) & (column < n - recent)
    sink_index = start + torch.arange(sink, device=live.device)
    is_sink = sink_index < n - recent
    first = slots.take(sink_index.clamp(max=n - 1)).only(is_sink)
    # A middle of n - sink - recent columns suffices: the others are dead in every row.
    middle = slots.only(is_middle).narrow(sink, n - sink - recent)
    return first, middle, slots.narrow(n - recent, recent)
