"""What every method keeps as it is: the first and the most recent tokens."""

from __future__ import annotations

from numbers import Integral

import torch

from kvsketch.errors import InputError
from kvsketch.slots import Slots


def check_window(sink: object, recent: object) -> tuple[int, int]:
    """Both as Python's ints; raises InputError unless they are ints >= 0."""
    checked = []
    for name, value in (("sink", sink), ("recent", recent)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise InputError(f"{name}={value!r} must be an int >= 0 (tokens kept unchanged)")
        checked.append(int(value))
    return checked[0], checked[1]


def split(slots: Slots, sink: int, recent: int) -> tuple[Slots, Slots, Slots]:
    """First ``sink`` live slots, what lies between, last ``recent`` live slots, per row and head.

    Where a row has too few live slots the parts are filled up with dead ones.
    """
    n = slots.count
    live = slots.live()
    if live is None:
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
