"""Parts whose tensors lie in a serving engine's memory, one row for each of its pages. All rows are
laid out alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from kvsketch.page.fields import EMPTY
from kvsketch.page.part import Part
from kvsketch.page.ragged import Ragged, flatten, unflatten


def of_contents(part: Part, contents: Iterator[Tensor], rows: int) -> Part:
    """The same layout with other ``contents``, in that order, of some rows that are all like
    the first."""
    fields = {name: next(contents) for name in part.fields}
    packed = {name: few.of(contents) for name, few in part.packed.items()}
    blocks = None if part.blocks is None else part.blocks.of_rows(rows)
    sizes = None if blocks is None else blocks.layout.sizes
    return Part.over(fields, packed, (rows, part.heads, part.base), sizes, blocks)


def rows_of(part: Part, which: slice | Tensor, count: int | None = None) -> Part:
    """Some rows, where all rows are alike: views for a slice, else copies.

    Args:
        which: the rows, int64 ``[rows]`` if it is no slice.
        count: the first slots of heads of the same size; None: all.
    """

    def some(tensor: Tensor) -> Tensor:
        return tensor[which] if isinstance(which, slice) else tensor.index_select(0, which)

    tensors = [some(tensor) for tensor in part.contents()]
    found = of_contents(part, iter(tensors), len(tensors[0]))
    found.base = part.base if count is None else count
    return found


def narrowed(part: Part, count: int) -> Part:
    """The first ``count`` slots of every head, or all that it has."""
    if part.blocks is None:
        count = min(count, part.base)
        few = Part.over({}, {}, (part.batch, part.heads, count))
        few.fields = {name: tensor[:, :, :count] for name, tensor in part.fields.items()}
        packed = {n: q.map_slots(lambda t: t[:, :, :count]) for n, q in part.packed.items()}
    else:
        few, packed = copy.copy(part), part.packed
        layout = part.blocks.layout
        few.sizes = layout.sizes.clamp(max=count)
        few.blocks = part.blocks.moved(Ragged(layout.start, few.sizes, layout.total))
        few.base = int(few.sizes.max())
    few.packed = {name: replace(one, count=few.base) for name, one in packed.items()}
    return few


def store(part: Part, new: Part, rows: Tensor) -> None:
    """Write a part into some rows, int64 ``[rows]``, of one that has room for its slots and no
    others after it."""
    shape = (new.batch, new.heads, new.count)
    layout = None
    if part.blocks is not None:
        own = part.blocks.of_rows(len(rows)).layout
        layout = Ragged(own.start, new.held.to(own.start.device), own.total)

    def laid(tensor: Tensor, name: str = "") -> Tensor:
        empty = EMPTY.get(name, 0.0)
        if new.layout is not None:
            tensor = unflatten(tensor, *new.layout.places(new.count), shape, empty)
        if layout is not None:
            places = layout.places(new.count)
            return flatten(tensor[:, :, : new.count], *places, layout.total, empty)
        wide = tensor.new_full((*shape[:2], part.base, *tensor.shape[3:]), empty)
        wide[:, :, : new.count] = tensor[:, :, : new.count]
        return wide

    for name, tensor in part.fields.items():
        there = new.fields[name] if name in new.fields else new.filled(name)
        tensor.index_copy_(0, rows, laid(there, name).to(tensor.dtype))
    for name, few in part.packed.items():
        others = new.packed[name].map_slots(laid).tensors()
        for tensor, there in zip(few.tensors(), others, strict=True):
            tensor.index_copy_(0, rows, there)


def clear(part: Part, rows: Tensor) -> None:
    """No slot in some rows: zero times a leftover infinity would be NaN."""
    for name, tensor in part.fields.items():
        tensor.index_fill_(0, rows, EMPTY.get(name, 0.0))
    for few in part.packed.values():
        for tensor in few.tensors():
            tensor.index_fill_(0, rows, 0)
