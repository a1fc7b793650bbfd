"""Attention over the slots of a layer, one part after another. Heads may differ in size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsketch.estimator import per_group
from kvsketch.kernels import cpu, native, triton_support
from kvsketch.observed import Observed
from kvsketch.page.part import Part
from kvsketch.page.quantized import Quantized
from kvsketch.partial import NOTHING, partial, together
from kvsketch.slots import compute_dtype


class PreparedAttention(Protocol):
    """A kernel for a run of tokens; see ``prepared``."""

    def attend(self, asked: Observed) -> Tensor | None: ...


# The number of keys (and values) in few bits that are turned into floats at a time, and of scores
# at a time. 4 MB stay in the processor's cache. A new tensor for all of them would cost more than
# the attention.
_PIECE = 1 << 20


def decode(asked: Observed, parts: Sequence[Part], padded: bool) -> Tensor:
    """Attention of one query per head over all slots of its head.

    Args:
        asked: queries ``[batch, num_attention_heads, 1, head_dim]``.
        parts: the slots. The last part is a page, which ends with the queries' own tokens.
        padded: whether some slots may be dead, so that a row may have no live one.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]``, zero where no slot is live.
    """
    by_triton = triton_fits(asked)
    page = parts[-1]
    batch, heads = asked.queries.shape[:2]
    if by_triton and asked.slopes is None:
        from kvsketch.kernels import gpu

        out, total = gpu.attend(asked, parts)
        if padded or asked.sinks is not None:
            grouped = (batch, page.heads, heads // page.heads)
            out, total = out.view(*grouped, -1), total.view(grouped)
            out = _finished(out, total, asked, page.heads, padded)
        return out.view(batch, heads, 1, -1)
    if by_triton and len(parts) == 1:
        from kvsketch.kernels import launches

        return launches.decode_part(asked, page, None)[0]
    newest = None if asked.slopes is None else _newest(page)
    last = None if newest is None else newest.flatten()
    if (found := cpu.attend(asked, parts, padded, last=last)) is not None:
        return found[0]
    packed = asked.queries.view(batch, page.heads, heads // page.heads, -1)
    out, total = together([over(packed, part, asked, newest) for part in parts])
    if padded or asked.sinks is not None:
        out = _finished(out, total, asked, page.heads, padded)
    return out.reshape(batch, heads, 1, out.shape[-1]).to(asked.queries.dtype)


def prepared(asked: Observed, parts: Sequence[Part], padded: bool) -> PreparedAttention:
    """What computes ``decode`` for a run of tokens, over parts whose tensors stay and whose last
    one grows: its ``attend`` returns None where it cannot."""
    if triton_fits(asked) and asked.slopes is None and asked.sinks is None and not padded:
        from kvsketch.kernels import gpu

        return gpu.PreparedLaunches(asked, parts)
    return cpu.Prepared(asked, parts, padded)


def prefill(asked: Observed, parts: Sequence[Part], padded: bool) -> Tensor:
    """Attention of a chunk of new tokens over the slots before them and, causally, over themselves.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]``, without ALiBi.
        parts: the slots. The last part is a page, which ends with the q newest tokens.
        padded: whether some slots may be dead.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``. The rows of padded queries are undefined.
    """
    page, before, new = parts[-1], parts[:-1], asked.queries.shape[2]
    if (known := cpu.attend(asked, parts, padded, newest=new)) is not None:
        return known[0]
    by_triton = triton_fits(asked)
    if by_triton:
        from kvsketch.kernels import launches
    if by_triton and not before:
        return launches.prefill_page(asked, page)[0]
    batch, heads, q, _ = asked.queries.shape
    group = heads // page.heads
    packed = asked.queries.reshape(batch, page.heads, group * q, -1)
    found = [over(packed, part, asked, None) for part in before]
    if by_triton:
        out, total = launches.prefill_page(replace(asked, sinks=None), page)
        shape = packed.shape[:3]
        found.append((out.reshape(*shape, -1), total.reshape(shape)))
    else:
        found += _chunk(packed, page, asked, padded)
    out, total = together(found)
    out = _finished(out, total, asked, page.heads, padded, q)
    return out.reshape(batch, heads, q, -1).to(asked.queries.dtype)


def _chunk(
    packed: Tensor, page: Part, asked: Observed, padded: bool
) -> list[tuple[Tensor, Tensor]]:
    """The attention over the slots of a page before the newest tokens and, causally, over the
    newest tokens, with the logs of its totals, ``[batch, heads, group * q]``."""
    q = asked.queries.shape[2]
    group, shape = packed.shape[2] // q, packed.shape[:3]
    keys, values, logs = _padded(page)
    before = page.count - q
    wide = [t[:, :, before:].repeat_interleave(group, dim=1) for t in (keys, values)]
    weight = None if logs is None else logs[:, :, before:]
    found = []
    if before:
        bias = None if logs is None else logs[:, :, :before].unsqueeze(2)
        keys, values = keys[:, :, :before], values[:, :, :before]
        found.append(partial(packed, keys, values, bias, asked.scaling, asked.softcap))
    bias = None
    if weight is not None and padded:
        later = torch.ones(q, q, dtype=torch.bool, device=packed.device).triu_(1)
        bias = weight.repeat_interleave(group, dim=1).unsqueeze(2)
        bias = bias.expand(-1, -1, q, -1).masked_fill(later, NOTHING)
    out, total = partial(
        asked.queries, wide[0], wide[1], bias, asked.scaling, asked.softcap, bias is None
    )
    found.append((out.reshape(*shape, -1), total.reshape(shape)))
    return found


def kernel_on(device: torch.device) -> str:
    """Which kernel decodes over slots on a device, in a few words."""
    if device.type == "cpu":
        return native.kernel()
    return "Triton" if triton_support.available(device) else "torch"


def triton_fits(asked: Observed) -> bool:
    """Whether the Triton kernels support these queries. ALiBi together with attention sinks in the
    softmax needs the query's own position, which a page does not store."""
    both = asked.slopes is not None and asked.sinks is not None
    return not both and triton_support.chosen(asked.queries)


def _padded(page: Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, mean values and log masses ``[batch, heads, count, ...]``, the newest tokens last."""
    fields = page.of_heads()
    return fields["keys"], fields["values"], fields.get("log_mass")


def over(
    packed: Tensor, part: Part, asked: Observed, newest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention of packed queries over one part of a layer's slots.

    Args:
        packed: ``[batch, heads, queries of a group, head_dim]``.
        part: the slots.
        asked: the queries before packing, with the scaling, the soft-cap and ALiBi's slopes.
        newest: the last position of each row, ``[batch, 1, 1, 1]``, if there are slopes.

    Returns:
        ``[batch, heads, queries of a group, value_dim]``, and the logs of the summed weights,
        ``[batch, heads, queries of a group]``.
    """
    # The kernels treat all queries of the same slots as heads of one group.
    mine = replace(asked, queries=packed.flatten(1, 2).unsqueeze(2), sinks=None)
    if triton_fits(asked):
        from kvsketch.kernels import launches

        out, total = launches.decode_part(mine, part, newest)
        return out.view(*packed.shape[:3], -1), total.view(packed.shape[:3])
    last = None if newest is None else newest.flatten()
    if (known := cpu.attend(mine, [part], last=last, totals=True)) is not None:
        out, totals = known
        assert totals is not None
        return out.view(*packed.shape[:3], -1), totals.view(packed.shape[:3])
    if part.packed:
        return _over_few_bits(packed, part, asked, newest)
    bias = _bias(part, asked, newest, packed)
    if part.blocks is None:
        keys, values = part.even("keys"), part.even("values")
        return partial(packed, keys, values, bias, asked.scaling, asked.softcap)
    owner, foreign, _ = part.blocks.found()
    queries = packed.flatten(0, 1).index_select(0, owner).unsqueeze(1)
    shape = (len(owner), 1, part.blocks.size, -1)
    keys, values = (part.fields[name].reshape(shape) for name in ("keys", "values"))
    found = partial(queries, keys, values, bias, asked.scaling, asked.softcap)
    return _of_heads(*found, foreign)


def _over_few_bits(
    packed: Tensor, part: Part, asked: Observed, newest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As ``over``, in pieces, for quantised keys or values.

    With keys ``offset + unit * y``, a score is <q, offset> + <q * unit, y>. The first term is the
    same for all slots of a head, so that it only shifts the logs. The unit of the values is a
    factor of the output. A soft-cap is not linear in the score, so that the keys are computed with
    unit and offset if there is one."""
    keys, values = part.packed["keys"], part.packed["values"]
    dtype, whole = compute_dtype(packed.dtype), asked.softcap is not None
    queries = packed.to(dtype)
    scaled = queries if whole else pad(queries * keys.unit, (0, keys.channels - keys.dim))
    bias, blocks = _bias(part, asked, newest, packed), part.blocks
    owner, axis = None, 2
    if blocks is not None:
        owner, axis = blocks.found()[0], 0
        scaled = scaled.flatten(0, 1).index_select(0, owner).unsqueeze(1)
        keys, values = (few.map_slots(_in_blocks(len(owner))) for few in (keys, values))
    length, rows = keys.codes.shape[axis], keys.codes[..., 0].numel()
    most = max(keys.channels, values.channels, scaled.shape[2])
    step = max(1, min(length, _PIECE * length // (rows * most)))
    found = []
    for start in range(0, length, step):
        some = slice(start, start + step)
        mine, weight = scaled, bias
        if owner is not None:
            mine, weight = scaled[some], None if bias is None else bias[some]
        elif bias is not None:
            weight = bias[..., some]
        k, v = (_in_units(few, axis, some, dtype) for few in (keys, values))
        if whole:
            k = _as_they_are(k, keys, None if owner is None else owner[some])
            v = v[..., : values.dim]
        found.append(partial(mine, k, v, weight, asked.scaling, asked.softcap))
    if blocks is None:
        out, total = together(found)
    else:
        out, total = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        out, total = _of_heads(out, total, blocks.found()[1])
    if keys.offset is not None and not whole:
        total = total + asked.scaling * (queries @ keys.offset.to(dtype).mT).squeeze(-1)
    return out[..., : values.dim] * values.unit.to(dtype), total


def _in_blocks(blocks: int) -> Callable[[Tensor], Tensor]:
    """From ``[batch, total, ...]`` to ``[blocks, 1, slots of a block, ...]``."""
    return lambda t: t.view(blocks, 1, -1, t.shape[-1])


def _in_units(few: Quantized, axis: int, some: slice, dtype: torch.dtype) -> Tensor:
    """Some of the slots (``axis`` 2) or blocks (0), without unit and offset, all channels."""
    if some.stop - some.start < few.codes.shape[axis]:
        few = few.map_slots(lambda t: t[some] if axis == 0 else t[:, :, some])
    out = torch.empty(*few.codes.shape[:3], few.channels, dtype=dtype, device=few.codes.device)
    few.in_units(out)
    return out


def _as_they_are(units: Tensor, few: Quantized, owner: Tensor | None) -> Tensor:
    """Keys with the unit and offset of their heads applied."""
    assert few.offset is not None
    unit, offset = few.unit, few.offset
    if owner is not None:
        unit, offset = (t.flatten(0, 1)[owner].unsqueeze(1) for t in (unit, offset))
    return units[..., : few.dim] * unit.to(units.dtype) + offset.to(units.dtype)


def _of_heads(out: Tensor, totals: Tensor, foreign: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over whole heads, from the attention over their blocks ``[blocks, 1, queries,
    value_dim]``."""
    batch, queries = len(foreign), out.shape[2]
    totals = totals.view(batch, 1, -1, queries).transpose(2, 3) + foreign
    whole = totals.logsumexp(-1)
    weights = (totals - whole.unsqueeze(-1)).exp_().transpose(1, 2)
    parts = out.view(batch, -1, queries, out.shape[-1]).transpose(1, 2)
    return (weights @ parts.to(weights.dtype)).transpose(1, 2), whole


def _bias(part: Part, asked: Observed, newest: Tensor | None, packed: Tensor) -> Tensor | None:
    """The bias of the scores from masses, dead slots and ALiBi, ``[batch, heads, 1 or queries,
    slots]``, or ``[blocks, 1, 1 or queries, slots of a block]`` if heads differ in size. None if
    there is no bias."""
    if part.blocks is None:
        logs = part.log_mass
        bias = None if logs is None else logs.unsqueeze(2)
        if newest is None:
            return bias
        bent = _bent(asked, part.even("positions").unsqueeze(2), newest, part.heads)
        return bent if bias is None else bent + bias
    owner, size = part.blocks.found()[0], part.blocks.size
    blocks, logs = len(owner), part.fields.get("log_mass")
    if logs is not None:
        bias = logs.view(blocks, 1, 1, size)
    else:
        live = part.blocks.live(part.appended)
        bias = torch.where(live, 0.0, NOTHING).view(blocks, 1, 1, size)
    if newest is None:
        return bias
    batch, heads, group = packed.shape[:3]
    bent = _bent(asked, part.fields["positions"].view(batch, 1, 1, -1), newest, heads)
    bent = bent.view(-1, group, bent.shape[-1] // size, size)
    mine = torch.arange(blocks, device=owner.device) % bent.shape[2]
    return bias + bent[owner, :, mine].unsqueeze(1)


def _newest(page: Part) -> Tensor:
    """The last position of each row, ``[batch, 1, 1, 1]``."""
    found = page.even("positions") if page.blocks is None else page.fields["positions"]
    return found.flatten(1).amax(1).view(-1, 1, 1, 1)


def _bent(asked: Observed, positions: Tensor, newest: Tensor, heads: int) -> Tensor:
    """ALiBi's bias of every slot, ``[batch, heads, group, slots]``. The positions ``[batch, heads
    or 1, 1, slots]`` are counted from the newest token, since softmax ignores a constant."""
    assert asked.slopes is not None
    slopes = asked.slopes.to(positions.dtype).view(1, heads, -1, 1)
    return slopes * (positions - newest)


def _finished(
    out: Tensor, log_total: Tensor, asked: Observed, heads: int, padded: bool, q: int = 1
) -> Tensor:
    """The output after attention sinks in the softmax took their share; zero if no slot is live."""
    if asked.sinks is not None:
        sink = per_group(asked.sinks, heads, asked.queries)[0, :, :, 0, 0]
        sink = sink.repeat_interleave(q, dim=1).to(log_total.dtype)
        out = out * torch.sigmoid(log_total - sink).unsqueeze(-1).to(out.dtype)
    if padded:
        out = out * (log_total > NOTHING / 2).unsqueeze(-1).to(out.dtype)
    return out
