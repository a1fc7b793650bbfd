"""Attention over a page: heads of equal size in one call, heads of any size in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.page import Page
from ..slots import Observed, per_group
from . import triton_support
from .partial import NOTHING, log_mass, partial, together


def decode(asked: Observed, page: Page, padded: bool) -> Tensor:
    """Attention of one query per head over all slots of its head.

    Args:
        asked: queries ``[batch, num_attention_heads, 1, head_dim]``.
        page: the slots, the queries' own tokens included.
        padded: whether some slots may be dead, so that a row may have no live one.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]``; zeros where no slot is live.
    """
    if triton_fits(asked, page):
        return _by_triton(asked, page)
    batch, heads = asked.queries.shape[:2]
    packed = asked.queries.view(batch, page.heads, heads // page.heads, -1)
    over = _over_equal_heads if page.layout is None else _over_blocks
    out, log_total = over(packed, page, asked)
    if padded or asked.sinks is not None:
        if page.layout is not None:
            log_total = log_total.logsumexp(-1)
        out = _finished(out, log_total, asked, page.heads, padded)
    return out.reshape(batch, heads, 1, out.shape[-1]).to(asked.queries.dtype)


def prefill(asked: Observed, page: Page, padded: bool) -> Tensor:
    """Attention of a chunk of new tokens over the slots before them and, causally, over themselves.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]``; no ALiBi.
        page: the slots, the q newest tokens included.
        padded: whether some slots may be dead.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``. A padded query's row means nothing.
    """
    if triton_fits(asked, page):
        return _prefill_by_triton(asked, page)
    batch, heads, q, _ = asked.queries.shape
    group = heads // page.heads
    keys, values, mass = _padded(page)
    packed = asked.queries.reshape(batch, page.heads, group * q, -1)
    before = page.count - q
    new = [t[:, :, before:] for t in (keys, values)]
    weight = None if mass is None else mass[:, :, before:]
    keys, values = keys[:, :, :before], values[:, :, :before]
    mass = None if mass is None else mass[:, :, :before]
    parts = []
    if keys.shape[2]:
        bias = None if mass is None else log_mass(mass).unsqueeze(2)
        out, total = partial(packed, keys, values, bias, asked.scaling, asked.softcap)
        parts.append((out.reshape(batch, heads, q, -1), total.reshape(batch, heads, q)))
    wide = [t.repeat_interleave(group, dim=1) if group > 1 else t for t in new]
    if weight is None or not padded:
        parts.append(
            partial(asked.queries, wide[0], wide[1], None, asked.scaling, asked.softcap, True)
        )
    else:
        later = torch.ones(q, q, dtype=torch.bool, device=keys.device).triu_(1)
        bias = log_mass(weight).repeat_interleave(group, dim=1).unsqueeze(2)
        bias = bias.expand(-1, -1, q, -1).masked_fill(later, NOTHING)
        parts.append(partial(asked.queries, wide[0], wide[1], bias, asked.scaling, asked.softcap))
    out, total = together(parts)
    shape = (batch, page.heads, group * q)
    out, total = out.reshape(*shape, -1), total.reshape(shape)
    out = _finished(out, total, asked, page.heads, padded, q)
    return out.reshape(batch, heads, q, -1)


def triton_fits(asked: Observed, page: Page) -> bool:
    """Whether the Triton kernels take these queries and this page: ALiBi beside sinks needs the
    query's own position, which a page does not know."""
    both = asked.slopes is not None and asked.sinks is not None
    return not both and triton_support.chosen(asked.queries)


def _by_triton(asked: Observed, page: Page) -> Tensor:
    """One launch for all heads, whatever their sizes."""
    from .triton_decode import decode as launch

    (start, count), flat = page.spans(), _flat(page)
    sinks, slopes = (None if x is None else x.float() for x in (asked.sinks, asked.slopes))
    positions = flat["positions"].float() if slopes is not None else None
    return launch(
        asked.queries,
        flat["keys"],
        flat["values"],
        flat.get("mass"),
        start,
        count,
        scaling=asked.scaling,
        softcap=asked.softcap,
        sinks=sinks,
        slopes=slopes,
        positions=positions,
        most=page.count + page.room,
    )[0]


def _prefill_by_triton(asked: Observed, page: Page) -> Tensor:
    """One launch: the slots before the new tokens, and these, causally."""
    from .triton_prefill import prefill as launch

    q = asked.queries.shape[2]
    (start, count), flat, new = page.spans(), _flat(page), page.last(q)
    return launch(
        asked.queries,
        flat["keys"],
        flat["values"],
        flat.get("mass"),
        start,
        count - q,
        new["keys"],
        new["values"],
        scaling=asked.scaling,
        new_mass=new.get("mass"),
        softcap=asked.softcap,
        sinks=None if asked.sinks is None else asked.sinks.float(),
    )[0]


def _flat(page: Page) -> dict[str, Tensor]:
    """The fields of a page, ``[batch, total, ...]``."""
    return {n: t.flatten(1, 2) if page.layout is None else t for n, t in page.fields.items()}


def _padded(page: Page) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, mean values and masses ``[batch, heads, count, ...]``, the newest tokens last."""
    if page.layout is None:
        return page.even("keys"), page.even("values"), page.even_mass
    slots = page.slots
    return slots.keys, slots.mean_values().to(slots.keys.dtype), slots.mass


def _over_equal_heads(packed: Tensor, page: Page, asked: Observed) -> tuple[Tensor, Tensor]:
    """The attention, and the logs of its totals, ``[batch, heads, group]``."""
    keys, values, mass = page.even("keys"), page.even("values"), page.even_mass
    bias = None if mass is None else log_mass(mass).unsqueeze(2)
    if asked.slopes is not None:
        bent = _bent(asked, page.even("positions").unsqueeze(2), page.heads)
        bias = bent if bias is None else bent + bias
    return partial(packed, keys, values, bias, asked.scaling, asked.softcap)


def _over_blocks(packed: Tensor, page: Page, asked: Observed) -> tuple[Tensor, Tensor]:
    """Every block of slots is attended to by the queries of its head, all blocks in one call, then
    the blocks of a head are put together. Returns that, and the logs of the blocks' totals,
    ``[batch, heads, group, blocks]``."""
    batch, heads, group, dim = packed.shape
    owner, foreign, _ = page.blocks()
    size, blocks = page.block, len(owner)
    queries = packed.reshape(-1, group, dim).index_select(0, owner).unsqueeze(1)
    keys = page.fields["keys"].view(blocks, 1, size, -1)
    values = page.fields["values"].view(blocks, 1, size, -1)
    mass = page.fields.get("mass")
    if mass is not None:
        bias = log_mass(mass).view(blocks, 1, 1, size)
    else:
        bias = torch.where(page.blocks_live(), 0.0, NOTHING).view(blocks, 1, 1, size)
    if asked.slopes is not None:
        bent = _bent(asked, page.fields["positions"].view(batch, 1, 1, -1), heads)
        bent = bent.view(-1, group, bent.shape[-1] // size, size)
        mine = torch.arange(blocks, device=keys.device) % bent.shape[2]
        bias = bias + bent[owner, :, mine].unsqueeze(1)
    out, total = partial(queries, keys, values, bias, asked.scaling, asked.softcap)
    totals = total.view(batch, 1, -1, group).transpose(2, 3) + foreign
    weights = totals.softmax(-1).transpose(1, 2)
    parts = out.view(batch, -1, group, out.shape[-1]).transpose(1, 2)
    return (weights @ parts.to(weights.dtype)).transpose(1, 2), totals


def _bent(asked: Observed, positions: Tensor, heads: int) -> Tensor:
    """ALiBi's bias of every slot, ``[batch, heads, group, slots]``; positions ``[batch, heads or 1,
    1, slots]`` are counted from the newest, since softmax ignores a constant."""
    assert asked.slopes is not None
    slopes = asked.slopes.to(positions.dtype).view(1, heads, -1, 1)
    return slopes * (positions - positions.amax((1, 3), keepdim=True))


def _finished(
    out: Tensor, log_total: Tensor, asked: Observed, heads: int, padded: bool, q: int = 1
) -> Tensor:
    """What attention sinks take, and zeros where nothing was live."""
    if asked.sinks is not None:
        sink = per_group(asked.sinks, heads, asked.queries)[0, :, :, 0, 0]
        sink = sink.repeat_interleave(q, dim=1).to(log_total.dtype)
        out = out * torch.sigmoid(log_total - sink).unsqueeze(-1).to(out.dtype)
    if padded:
        out = out * (log_total > NOTHING / 2).unsqueeze(-1).to(out.dtype)
    return out
