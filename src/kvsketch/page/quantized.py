"""Keys and values in 8 or 4 bits, in a format in which quantising them again changes nothing.

KIVI (2402.02750) gives every channel of the keys a scale per group of neighbouring slots, because
a few channels are far larger than the others. However, the groups change at every recompression,
so that every remaining slot is rounded to another grid, and the errors add up (measured: 3.4 times
the error after 80 recompressions). Here the two purposes of these scales are separated. Each
channel of the keys has a centre and a unit, computed once per head from the first slots that are
quantised, which handles the large channels. Each slot has its own scale, which stays with it when
its neighbours change. A slot that is read and quantised again gets the same bits.

A slot has no zero point, unlike KIVI's values: channels lie on either side of 0, those of keys
around their centres, and the bytes of zero points buy more slots. The channel that is farthest from
0 gets the lowest code, and the scale its sign, so that all codes are used (as in ggml's Q4_0). The
scale of a key is then corrected so that the key keeps its length, without which the tokens that a
query looks for would lose weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.state import Reader, State

ALLOWED_BITS = (16, 8, 4)
#: The largest number of channels of a slot that share a scale.
GROUP = 64
# Centres and units from fewer slots than this are computed again once there are twice as many.
_ENOUGH = 64
#: A slot may be so many times as far from the centre as the mean, for a scale in float16.
FARTHEST = 2.0**14
# The approximate largest number of slots from which centres and units are computed.
_SAMPLE = 1024


class Bits(NamedTuple):
    """The bits of the keys and of the values of slots between sinks and recent window. 16: in the
    model's own dtype."""

    keys: int
    values: int

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"


FULL = Bits(16, 16)


def check_bits(bits: object) -> int:
    """Return ``bits`` if it is 16 (stored as given), 8 or 4.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in ALLOWED_BITS:
        raise InputError(
            f"bits={bits!r} must be one of 16 (keys and values as the model has them), 8 or 4"
        )
    return bits


@dataclass(frozen=True)
class Quantized:
    """Keys or values ``[batch, heads, slots, dim]`` as ``offset + unit * step * (code - half)``,
    where ``half`` is 128 or 8.

    Attributes:
        bits: 8 or 4.
        dim: channels of a slot.
        count: slots of the largest head.
        codes: uint8 ``[batch, heads, slots, bytes]`` (in storage, ``[batch, slots of all heads,
            bytes]`` if heads differ in size). With 4 bits, byte i holds channel i in its lower half
            and channel ``bytes + i`` in its upper one. If channels do not divide into groups and
            bytes, they are padded by repeating the last one.
        step: scales, float16 ``[batch, heads, slots, groups]``; negative where the channel that is
            farthest from 0 is positive.
        unit: float32 ``[batch, heads, 1, dim or 1]``, per channel for keys, per head for values.
        offset: float32 ``[batch, heads, 1, dim]``, the centre of each channel. None for values, so
            that a value of 0 stays exactly 0.

    The error of an element of a value is at most ``unit * max(|step| / 2, 2**-16)``, apart from
    float rounding; at the end of the codes opposite to the farthest channel, at most ``17/16`` of a
    step. Of a key, whose scale is corrected, it may be half a step more.
    """

    bits: int
    dim: int
    count: int
    codes: Tensor
    step: Tensor
    unit: Tensor
    offset: Tensor | None

    def read(self, out: Tensor) -> None:
        """Write the dequantised slots into ``out`` ``[batch, heads, slots, dim]``, of any floating
        point dtype. The computation is in float32."""
        in_place = out.dtype == torch.float32 and self.channels == self.dim
        shape = (*self.codes.shape[:3], self.channels)
        work = out if in_place else torch.empty(shape, dtype=torch.float32, device=out.device)
        self.in_units(work)
        work = work if in_place else work[..., : self.dim]
        work.mul_(self.unit)
        if self.offset is not None:
            work.add_(self.offset)
        if not in_place:
            out.copy_(work)

    def in_units(self, out: Tensor) -> None:
        """Write ``step * (code - half)``, without ``unit`` and ``offset``, into contiguous ``out``
        ``[batch, heads, slots, channels]``."""
        if self.bits == 4:
            half = self.codes.shape[-1]
            out[..., :half] = self.codes & 15
            out[..., half:] = self.codes >> 4
        else:
            out.copy_(self.codes)
        parts = out.view(*out.shape[:3], self.step.shape[-1], -1)
        parts.sub_(2 ** (self.bits - 1)).mul_(self.step.to(out.dtype).unsqueeze(-1))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the keys or values would have if they were not quantised."""
        return (*self.codes.shape[:-1], self.dim)

    @property
    def channels(self) -> int:
        """The number of channels with codes: ``dim`` plus padding."""
        return self.codes.shape[-1] * 8 // self.bits

    def map(self, fn: Callable[[Tensor], Tensor]) -> Quantized:
        """Apply ``fn`` (which acts on axis 0, the batch) to every tensor."""
        return replace(
            self,
            codes=fn(self.codes),
            step=fn(self.step),
            unit=fn(self.unit),
            offset=None if self.offset is None else fn(self.offset),
        )

    def map_slots(self, fn: Callable[[Tensor], Tensor]) -> Quantized:
        """Apply ``fn``, which moves slots, to the tensors with entries per slot."""
        return replace(self, codes=fn(self.codes), step=fn(self.step))

    def to_state(self) -> State:
        """The state, from which ``from_state`` restores the object."""
        state = State(values={"bits": self.bits, "count": self.count})
        state.keep(codes=self.codes, step=self.step, unit=self.unit, offset=self.offset)
        return state

    @staticmethod
    def from_state(
        reader: Reader, lead: tuple[int, ...], heads: tuple[int, int], dim: int, per_channel: bool
    ) -> Quantized:
        """Restore the result of ``to_state``.

        Args:
            lead: the shape of ``codes`` without its last axis.
            heads: the numbers of rows and KV heads.
            dim, per_channel: as for the class and ``quantize``.

        Raises:
            InputError: inconsistent tensors.
        """
        bits, count = reader.whole("bits", 4, 8), reader.whole("count")
        if bits not in ALLOWED_BITS:
            raise reader.wrong("bits", bits, "8 or 4")
        groups, width = _layout(dim, bits)
        found = Quantized(
            bits,
            dim,
            count,
            reader.tensor("codes", (*lead, groups * width * bits // 8), torch.uint8),
            reader.tensor("step", (*lead, groups), torch.float16),
            reader.tensor("unit", (*heads, 1, dim if per_channel else 1), torch.float32),
            reader.tensor("offset", (*heads, 1, dim), torch.float32) if per_channel else None,
        )
        reader.close()
        return found

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = [self.codes, self.step, self.unit]
        return held if self.offset is None else [*held, self.offset]

    def of(self, tensors: Iterator[Tensor]) -> Quantized:
        """The same object with other ``tensors()``, taken from the iterator."""
        codes, step, unit = (next(tensors) for _ in range(3))
        offset = None if self.offset is None else next(tensors)
        return replace(self, codes=codes, step=step, unit=unit, offset=offset)


def quantize(
    rows: Tensor,
    bits: int,
    *,
    per_channel: bool,
    live: Tensor | None = None,
    previous: Quantized | None = None,
) -> Quantized:
    """Quantise keys (``per_channel=True``) or values (False) to 8 or 4 bits.

    Args:
        rows: finite floating point ``[batch, heads, slots, dim]``. Slots read from ``previous``
            get the same codes if they are given in float32.
        bits: 8 or 4.
        per_channel: whether every channel has its own centre and unit.
        live: bool ``[batch, heads, slots]``. Other slots do not affect centres and units, and are
            stored as the centre.
        previous: the source of centres and units. A unit is doubled if the mean distance of the
            slots from the centre exceeds it, which happens only a logarithmic number of times in a
            stream. Otherwise it never changes.
    """
    x = rows.float()
    return coded(x, bits, *_grid(x, live, per_channel, previous), live)


def coded(
    x: Tensor, bits: int, offset: Tensor | None, unit: Tensor, live: Tensor | None
) -> Quantized:
    """``quantize`` with a given centre and unit, of at least half the ``distance`` of ``x``, which
    is float32."""
    x = (x / unit) if offset is None else (x - offset).div_(unit)
    if live is not None:
        x = x.masked_fill(~live.unsqueeze(-1), 0.0)
    dim = x.shape[-1]
    groups, width = _layout(dim, bits)
    if groups * width > dim:  # repeating a channel does not widen the range
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:3], groups * width - dim)], dim=-1)
    x = x.reshape(*x.shape[:3], groups, width)
    half = 2 ** (bits - 1)
    least, most = x.amin(-1), x.amax(-1)
    step = (torch.where(most > -least, most, least) / -half).half()
    scale = torch.where(step == 0, 1.0, step.float()).unsqueeze(-1)
    rounded = (x / scale).round_().clamp_(-half, half - 1)
    if offset is not None:
        padded = torch.nn.functional.pad(unit, (0, groups * width - dim))
        step = _unbiased(x, rounded, step, padded.view(*unit.shape[:3], groups, width), half)
    codes = rounded.add_(half).flatten(-2).to(torch.uint8)
    if bits == 4:
        middle = codes.shape[-1] // 2
        codes = codes[..., :middle] | codes[..., middle:] << 4
    return Quantized(bits, dim, x.shape[2], codes.contiguous(), step, unit, offset)


def _unbiased(x: Tensor, codes: Tensor, step: Tensor, unit: Tensor, half: int) -> Tensor:
    """The scales with which rounding does not change the length of a key along itself, seen from
    the centre of the keys: ``<key, rounded key> = <key, key>``, over ``unit``, since queries are
    small in the channels in which keys are large. Rounding makes keys shorter, as the codes end at
    ``half - 1`` on one side, so that just the tokens that a query looks for would lose weight.
    RaBitQ (2405.12497) estimates inner products by the same ratio. Of a key that was rounded
    before, the ratio is 1: quantising it again changes nothing."""
    own = unit * x
    length, found = (own * x).sum(-1), (own * codes).sum(-1) * step.float()
    ratio = torch.where(found > 0, length / found, 1.0)
    # It is farther from 1 only where a few channels make up the sums.
    return (step.float() * ratio.clamp(1 - 0.5 / half, 1 + 0.5 / half)).half()


def slot_bytes(dim: int, bits: int) -> int:
    """Bytes of one key or value in 8 or 4 bits, scales included."""
    groups, width = _layout(dim, bits)
    return groups * width * bits // 8 + 2 * groups


def _layout(dim: int, bits: int) -> tuple[int, int]:
    """The number of groups of a slot and of channels of a group, padded so that 4 bits end on a
    byte."""
    groups = math.ceil(dim / GROUP)
    width = math.ceil(dim / groups)
    return groups, width + (width % 2 if bits == 4 else 0)


def _grid(
    x: Tensor, live: Tensor | None, per_channel: bool, previous: Quantized | None
) -> tuple[Tensor | None, Tensor]:
    """The centres and units for ``x``."""
    if previous is not None and previous.count >= min(_ENOUGH, x.shape[2] / 2):
        offset, unit = previous.offset, previous.unit
        growth = (distance(x, offset, live, per_channel) / unit).log2().ceil().clamp(min=0)
        return offset, unit * growth.exp2()
    offset = None
    if per_channel:
        least, most = _range(x, live)
        offset, unit = (least + most) / 2, (most - least) / 2
        # A channel that is constant so far may not stay constant.
        unit = unit.clamp(min=unit.mean(-1, keepdim=True) / 128)
        unit = torch.maximum(unit, distance(x, offset, live, per_channel))
    else:
        unit = 2 * distance(x, offset, live, per_channel)
    return offset, torch.where(unit > 0, unit, 1.0)


def _range(x: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first and last percentile of every channel, ``[batch, heads, 1, dim]`` each, so that a
    few outliers have no influence. Computed from about a thousand evenly spread slots."""
    stride = max(1, x.shape[2] // _SAMPLE)
    x = x[:, :, ::stride]
    live = torch.ones_like(x[..., 0], dtype=torch.bool) if live is None else live[:, :, ::stride]
    rank = (live.sum(-1) - 1).clamp(min=0) // 100
    place = rank[..., None, None].expand(-1, -1, x.shape[-1], 1)

    def ends(smallest: bool) -> Tensor:
        far = torch.inf if smallest else -torch.inf
        channels = x.masked_fill(~live.unsqueeze(-1), far).mT
        found = channels.topk(int(rank.max()) + 1, largest=not smallest).values.gather(3, place)
        # Without live slots, all are infinite.
        return found.mT.nan_to_num(posinf=0.0, neginf=0.0)

    return ends(True), ends(False)


def distance(x: Tensor, offset: Tensor | None, live: Tensor | None, per_channel: bool) -> Tensor:
    """The mean distance of the live slots from the centre, per channel ``[batch, heads, 1, dim]``
    or per head. One large slot hardly changes it. It is large enough that every distance divided by
    it can be stored in float16."""
    distance = (x if offset is None else x - offset).abs()
    count: Tensor | int = x.shape[2]
    if live is not None:
        distance = distance.masked_fill(~live.unsqueeze(-1), 0.0)
        count = live.sum(2).clamp(min=1)[..., None, None]
    mean, most = distance.sum(2, keepdim=True) / count, distance.amax(2, keepdim=True)
    if not per_channel:
        mean, most = mean.mean(-1, keepdim=True), most.amax(-1, keepdim=True)
    return torch.maximum(mean, most / FARTHEST)
