"""Exchanges slots of parts in few bits, by the compiled kernel for CPUs: all parts in two calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.kernels import cpu, native
from kvsketch.page.exchange import FAR, Lowest
from kvsketch.page.fields import COLUMNS, EMPTY, fields_of
from kvsketch.page.part import Part
from kvsketch.page.quantized import FARTHEST
from kvsketch.page.ragged import Blocks
from kvsketch.slots import Slots


class _Exchange(ctypes.Structure):
    """``Exchange`` of exchange.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "others")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "heads")),
        *((name, ctypes.c_void_p) for name in ("taken", "fresh", "places")),
        *((name, ctypes.c_int64) for name in ("most", "width")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", *COLUMNS, "in_place", "far")),
        *((name, ctypes.c_double) for name in ("limit", "farthest")),
        *((name, ctypes.c_int64) for name in ("owners", "next")),
    )


class CompiledLowest:
    """``Lowest`` of parts of equally many rows that the kernel can read, see ``lowest``.

    Args:
        parts, count: as of ``Lowest``, on the CPU.
        described: of the parts, from ``cpu.addresses``.

    Attributes:
        slots: as of ``Lowest``.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        count: Tensor,
        described: tuple[cpu.Numbers, int, list[cpu.Numbers]],
    ) -> None:
        self._parts, self._count, self._described = parts, count.contiguous(), described
        first, most = parts[0], max(1, int(count.max()))
        shape = (*count.shape, most)
        self._places = torch.empty(shape, dtype=torch.int64, device="cpu")
        fields = {n: _empty(*shape, few.dim) for n, few in first.packed.items()}
        fields |= {name: _empty(*shape) for name in COLUMNS if name in first.fields}
        self._run(None, most, 0, fields)
        found = Part.over(fields, {}, shape).read()
        real = torch.arange(most, device="cpu") < count.unsqueeze(-1)
        self.slots = found if bool(real.all()) else found.only(real)

    def _run(
        self,
        others: Sequence[Part] | None,
        most: int,
        width: int,
        fields: dict[str, Tensor],
        *sizes: Tensor,
    ) -> None:
        """Call the kernel. ``sizes``: the slots of each head that come, whether each part's come in
        place, and for the result whether they are too far."""
        library, first = native.library(), self._parts[0]
        assert library is not None
        after = None if others is None else cpu.addresses(others)
        fresh, in_place, far = (t.data_ptr() for t in sizes) if sizes else (None, None, None)
        exchange = _Exchange(
            ctypes.addressof(self._described[0]),
            None if after is None else ctypes.addressof(after[0]),
            *(len(self._parts), first.batch, first.heads),
            *(self._count.data_ptr(), fresh, self._places.data_ptr()),
            *(most, width),
            *(fields[name].data_ptr() for name in ("keys", "values")),
            *(fields[name].data_ptr() if name in fields else None for name in COLUMNS),
            *(in_place, far),
            *(FAR, FARTHEST),
            *(self._count.numel(), 0),
        )
        library.kvsketch_exchange(ctypes.byref(exchange), native.threads())

    def exchanged(self, new: Slots, sizes: Tensor) -> list[Part | None]:
        """As ``Lowest.exchanged``."""
        fields = {name: tensor.float().contiguous() for name, tensor in fields_of(new).items()}
        names = [n for n in COLUMNS if n in self._parts[0].fields or n in fields]
        before = torch.cat([part.held for part in self._parts])
        held = before - self._count + sizes
        together = held.view(len(self._parts), -1)
        same = (together == before.view(together.shape)).all(1)
        most, least = together.amax(1), together.amin(1)
        others = [
            _of_sizes(part, names, *one)
            for part, *one in zip(
                self._parts,
                torch.split(held, self._parts[0].batch),
                most.tolist(),
                (most == least).tolist(),
                same.tolist(),
                strict=True,
            )
        ]
        far = torch.zeros(len(others), dtype=torch.int64, device="cpu")
        numbers = sizes.contiguous(), same.to(torch.int64), far
        self._run(others, self._places.shape[-1], new.count, fields, *numbers)
        return [None if bad else part for bad, part in zip(far.tolist(), others, strict=True)]


def _of_sizes(
    part: Part, names: Sequence[str], held: Tensor, most: int, even: bool, same: bool
) -> Part:
    """A part like another, of heads that hold so many slots, whose contents are still to come."""
    blocks = part.blocks if same else None if even else Blocks(held)
    lead: tuple[int, ...] = (part.batch, part.heads, most)
    if same:
        lead = part.lead[0]
    elif blocks is not None:
        lead = (part.batch, blocks.layout.total)
    packed = {
        name: replace(
            few,
            count=most,
            codes=few.codes.new_zeros((*lead, few.codes.shape[-1])),
            step=few.step.new_zeros((*lead, few.step.shape[-1])),
        )
        for name, few in part.packed.items()
    }
    fields = {}
    for name in names:
        fill = 0.0 if blocks is None else EMPTY.get(name, 0.0)
        fields[name] = torch.full(lead, fill, dtype=torch.float32, device="cpu")
    sizes = None if blocks is None else held
    return Part.over(fields, packed, (part.batch, part.heads, most), sizes, blocks)


def lowest(parts: Sequence[Part], count: Tensor) -> Lowest | CompiledLowest:
    """``Lowest``, compiled if the kernel can read the parts."""
    alike = len({part.batch for part in parts}) == 1
    usable = alike and count.device.type == "cpu" and native.library() is not None
    described = cpu.addresses(parts) if usable else None
    return Lowest(parts, count) if described is None else CompiledLowest(parts, count, described)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")
