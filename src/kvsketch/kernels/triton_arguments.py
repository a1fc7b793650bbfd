"""The arguments of the attention kernels: a flat page, new tokens and scores, as tensors and their
strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from kvsketch.kernels.flat_page import Page
from kvsketch.kernels.triton_tuning import padded
from kvsketch.page.quantized import Quantized


class Stored(NamedTuple):
    """Keys or values of a flat page as kernel arguments: tensors and their strides (``at``)."""

    data: Tensor
    data_at: tuple[int, ...]
    step: Tensor | None
    step_at: tuple[int, ...]
    unit: Tensor | None
    unit_at: tuple[int, ...]
    offset: Tensor | None
    offset_at: tuple[int, ...]
    dim: tl.constexpr
    bits: tl.constexpr  # 0: not quantised
    width: tl.constexpr
    bytes: tl.constexpr
    groups: tl.constexpr
    tiles: tl.constexpr  # groups, up to a power of two


class Flat(NamedTuple):
    """A flat page, and which slots belong to which head."""

    key: Stored  # not "keys" and "values": Triton uses the latter for the elements of a tuple
    value: Stored
    mass: Tensor | None
    mass_at: tuple[int, ...]
    positions: Tensor | None
    positions_at: tuple[int, ...]
    starts: Tensor
    starts_at: tuple[int, ...]
    counts: Tensor
    counts_at: tuple[int, ...]
    total: int
    rows: Tensor | None
    rows_at: tuple[int, ...]


class New(NamedTuple):
    """The new tokens as kernel arguments: tensors and their strides (``at``)."""

    key: Tensor
    key_at: tuple[int, ...]
    value: Tensor
    value_at: tuple[int, ...]
    mass: Tensor | None
    mass_at: tuple[int, ...]
    positions: Tensor | None
    positions_at: tuple[int, ...]


class KernelScores(NamedTuple):
    """The parameters that turn inner products into scores."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    sinks_at: tuple[int, ...]
    slopes: Tensor | None
    slopes_at: tuple[int, ...]


def stored(page: Page) -> Stored:
    """``page`` as arguments of a launch."""
    codes = page.codes if isinstance(page, Quantized) else page
    quantised: tuple[Any, ...]
    if isinstance(page, Quantized):
        unit_at = at(page.unit)
        if page.unit.shape[3] == 1:  # the same for all channels
            unit_at = (*unit_at[:3], 0)
        quantised = (page.step, at(page.step), page.unit, unit_at, page.offset, at(page.offset))
        groups = page.step.shape[2]
        width = page.channels // groups
        layout = (page.dim, page.bits, width, codes.shape[2], groups, padded(groups, 1))
    else:
        quantised, layout = (None, (0,)) * 3, (codes.shape[2], 0, 1, 1, 1, 1)
    return Stored(codes, at(codes), *quantised, *map(tl.constexpr, layout))


def flat(
    keys: Page,
    values: Page,
    log_mass: Tensor | None,
    positions: Tensor | None,
    start: Tensor,
    count: Tensor,
    pages: Tensor | None = None,
) -> Flat:
    """A flat page as arguments of a launch."""
    return Flat(
        stored(keys),
        stored(values),
        log_mass,
        at(log_mass),
        positions,
        at(positions),
        start,
        at(start),
        count,
        at(count),
        keys.shape[1],
        pages,
        at(pages),
    )


def width_of(page: Stored) -> int:
    """The columns of a tile of slots, see ``triton_slots.columns``."""
    if page.bits.value == 4:
        return 2 * padded(page.bytes.value)
    return padded(page.dim.value if page.bits.value == 0 else page.bytes.value)


def at(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides of a tensor; none for None."""
    return (0,) if tensor is None else tuple(tensor.stride())
