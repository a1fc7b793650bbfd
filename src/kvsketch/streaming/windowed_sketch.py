"""Sink + recent window around a natively streaming sketch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..compressors.base import check_input
from ..compressors.windowed import check_window, split
from ..slots import Observed, Slots
from .base import Sketch, lengthened


class WindowedSketch:
    """For ``Periodic`` what ``Windowed`` is to a compressor: the first ``sink`` and last ``recent``
    live tokens stay as they are, everything between goes into a sketch, once and for all.

    Between calls it remembers the sketch, so the slots handed back must come in again, with the
    new tokens behind them. The sketch's own state and its slots are both held (and counted).

    Dead slots fill up what the sketch asks to have ``reserved``: how many exact tokens fit beside
    it, and so when a cache compresses, is then the same whatever other rows of a batch hold.

    Args:
        build: makes the sketch for a number of slots, at the first compression.
        sink: tokens kept from the start, >= 0.
        recent: tokens kept from the end, >= 0.
        least: slots the sketch needs at least; a budget below that compresses nothing.

    Raises:
        InputError: sink or recent negative or not an int.
    """

    needs_queries = False
    accumulates = False
    window: int | None = None
    #: its slots may have u without m and m without u
    split_sums = True

    def __init__(
        self, build: Callable[[int], Sketch], sink: int = 4, recent: int = 32, least: int = 1
    ) -> None:
        check_window(sink, recent)
        self.build, self.sink, self.recent, self.least = build, sink, recent, least
        self.reset()

    def reset(self) -> None:
        """Forget the sketch."""
        self.sketch: Sketch | None = None
        self._rows: Tensor | None = None
        self._sinks = self._window = 0  # sink and recent as far as the first budget had room
        self._dtype: torch.dtype | None = None  # of the values that came in first
        self._before = 0  # slots in front of the recent window: sinks and sketch

    def recent_at(self, budget: int) -> int:
        """Recent tokens that are kept as they are: what the first budget had room for."""
        return self._window

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        return slots

    def __call__(self, slots: Slots, budget: int, observed: Observed | None = None) -> Slots:
        """As ``Windowed.__call__``, but the first call's budget decides the sketch's size for
        good, and how close to it a sketch stays is the sketch's own promise."""
        check_input(slots, budget)
        if self.sketch is None:
            if slots.count <= budget or budget < self.least:
                return slots
            self._sinks = min(self.sink, budget - self.least)
            self._window = min(self.recent, budget - self.least - self._sinks)
            first, middle, last = split(slots, self._sinks, self._window)
            self.sketch = self.build(budget - self._sinks - self._window)
            if self._rows is not None:
                self.sketch.number_rows(self._rows)
        else:
            first = slots.narrow(0, self._sinks)
            rest = slots.narrow(self._before, slots.count - self._before)
            if rest.count <= self._window:
                return slots
            _, middle, last = split(rest, 0, self._window)
        # A sketch's own values may be float32 and make the page so; tokens come back unrounded.
        self._dtype = self._dtype or slots.values.dtype
        self.sketch.extend(replace(middle, values=middle.values.to(self._dtype), score=None))
        middle = self.sketch.slots
        room = self.sketch.reserved - middle.count
        if room > 0:
            middle = replace(middle, mass=middle.masses()).map(lambda t: lengthened(t, room))
        self._before = first.count + middle.count
        return Slots.cat([first, middle, last])

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to the batch axis of what the sketch holds; rows are numbered anew."""
        self._rows = None
        if self.sketch is not None:
            self.sketch.map_batch(fn)

    def number_rows(self, rows: Tensor) -> None:
        """Say which rows of a larger batch these are, see ``Sketch.number_rows``."""
        self._rows = rows
        if self.sketch is not None:
            self.sketch.number_rows(rows)

    def tensors(self) -> list[Tensor]:
        """Every tensor the sketch holds."""
        return [] if self.sketch is None else self.sketch.tensors()
