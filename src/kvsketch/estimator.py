"""The attention estimator of every method in this package.

Attention over slots, of keys k, value-sums u and masses m (``slots.Slots``), is

    z(q) = sum_s exp(<q, k_s>) u_s / sum_s exp(<q, k_s>) m_s        (scaling folded into q)

This file is plain torch and is the reference that every kernel is tested against.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.observed import Observed, causal
from kvsketch.pieces import at_once
from kvsketch.slots import Slots, compute_dtype

# Scores of the m = 0 slots are not part of the softmax shift (an empty slot must not decide it),
# so their exponent is bounded instead: exp(80) is still finite in float32.
_MAX_EXPONENT = 80.0
# attend() and attention_received() process queries in blocks of at most this many scores.
_BLOCK_SCORES = 1 << 21  # 8 MB in float32, about the size of a CPU cache
# Queries of attention_received() at a time, if there are so many.
_FEW_QUERIES = 16


def attend(
    queries: Tensor,
    slots: Slots,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries over slots: ``[softmax(qK) U] / [softmax(qK) m]``.

    Args:
        queries: ``[batch, num_attention_heads, q, head_dim]``; query head h uses KV head
            ``h // (num_attention_heads / num_key_value_heads)``.
        slots: the slots to attend to.
        scaling: multiplies the scores; default ``head_dim ** -0.5``.
        softcap: logit soft-capping, applied after scaling.
        mask: bool, True where a query may attend, broadcastable to ``[batch, num_attention_heads,
            q, slots]``.
        slopes: ``[num_attention_heads]``, ALiBi slopes; needs ``slots.positions``.
        sinks: ``[num_attention_heads]``, logits of attention sinks: exp(sink) is added to the
            denominator of every query of that head.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries. Computed in at
        least float32. A query that attends to no mass gets zeros.

    Raises:
        InputError: num_attention_heads is not a multiple of num_key_value_heads, a wrong head_dim,
            slopes without positions, slopes or sinks for another number of heads.
    """
    check_queries(queries, slots, slopes)
    sink = None if sinks is None else per_group(sinks, slots.keys.shape[1], queries)
    blocks = []
    for rows in query_blocks(queries, slots.count):
        block_mask = mask[:, :, rows] if mask is not None and mask.shape[2] > 1 else mask
        scores = attention_scores(queries[:, :, rows], slots, scaling, softcap, block_mask, slopes)
        weights, mass, taken = _weights(scores, slots.mass, sink)
        total = (
            (weights * mass).sum(-1, keepdim=True) if mass is not None else weights.sum(-1, True)
        )
        if taken is not None:
            total = total + taken
        values = slots.values.to(weights.dtype).unsqueeze(2)
        shape = weights.shape
        flat = weights.reshape(*shape[:2], 1, shape[2] * shape[3], shape[4])
        summed = (flat @ values).reshape(*shape[:4], -1)
        out = torch.where(total != 0, summed / torch.where(total != 0, total, 1.0), 0.0)
        blocks.append(out.flatten(1, 2).to(queries.dtype))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def attention_received(
    slots: Slots,
    observed: Observed,
    weights: Tensor | None = None,
    largest: bool = False,
    factors: Tensor | None = None,
) -> Tensor:
    """Attention each slot received from the observed queries, summed over queries (times
    ``weights``, float ``[batch, q]``) and the query heads of its group: float32 ``[batch,
    num_key_value_heads, slots]``. The whole queries x slots matrix is never formed.

    Args:
        largest: the largest attention of any query and head of the group, instead of the sum.
        factors: with ``largest``: the attention of each head of the group is first multiplied by
            this, ``[batch, num_key_value_heads, group, slots]``.
    """
    check_queries(observed.queries, slots, observed.slopes)
    heads, n, q = slots.keys.shape[1], slots.count, observed.queries.shape[2]
    batch, group = len(observed.queries), observed.queries.shape[1] // heads
    received = torch.zeros_like(slots.masses())
    # All heads, if a few queries of each fit; with fewer heads the keys would be read repeatedly.
    most = at_once(slots.keys, _BLOCK_SCORES)
    few = max(1, min(q, max(_FEW_QUERIES, most // max(1, batch * heads * group * n))))
    some = max(1, most // max(1, batch * group * few * n))
    for head in range(0, heads, some):
        mine = slice(head, head + some)
        asked = _of_heads(observed, mine, heads)
        part = slots.map(lambda t, mine=mine: t[:, mine])  # type: ignore[misc]
        for start in range(0, q, few):
            late = asked.narrow(start, min(few, q - start))
            weight = None if weights is None else weights[:, start : start + few]
            end = n - q + start + late.queries.shape[2]  # no query attends further
            seen = part if observed.after else part.narrow(0, end)
            factor = None if factors is None else factors[:, mine, :, : seen.count]
            found = _received(seen, late, weight, largest, factor)
            target = received[:, mine, : seen.count]
            if largest:
                torch.maximum(target, found.to(target.dtype), out=target)
            else:
                target += found
    return received


def _of_heads(observed: Observed, heads: slice, count: int) -> Observed:
    """The queries of some of ``count`` KV heads."""

    group = observed.queries.shape[1] // count
    mine = slice(heads.start * group, heads.stop * group)
    slopes, sinks = (x if x is None else x[mine] for x in (observed.slopes, observed.sinks))
    queries = observed.queries[:, mine]
    return replace(observed, queries=queries, slopes=slopes, sinks=sinks, total=None)


def _received(
    slots: Slots,
    observed: Observed,
    weights: Tensor | None,
    largest: bool,
    factors: Tensor | None,
) -> Tensor:
    """``attention_received`` of few enough queries."""
    queries, heads = observed.queries, slots.keys.shape[1]
    visible = None if observed.after else causal(queries.shape[2], slots.count, queries.device)
    if observed.live is not None:
        live = observed.live[:, None, :, None]
        visible = live if visible is None else visible & live
    scores = attention_scores(
        queries, slots, observed.scaling, observed.softcap, visible, observed.slopes
    )
    if slots.mass is not None:
        # a slot of mass m receives m exp(score) / total; log 0 masks a dead slot
        scores += slots.mass.to(scores.dtype).log()[:, :, None, None]
    if observed.sinks is None:
        share = scores.softmax(-1)
    else:
        sink = per_group(observed.sinks, heads, queries)
        share = (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink)).exp_()
    if observed.live is not None or slots.mass is not None:
        share = share.nan_to_num_(0.0)  # a padded query attends to nothing
    if largest:
        if weights is not None:
            share = share * weights[:, None, None, :, None].to(share.dtype)
        if factors is not None:  # the same for every query
            return (share.amax(3) * factors.to(share.dtype)).amax(2)
        return share.amax((2, 3))
    if weights is None:
        return share.sum((2, 3))
    return torch.einsum("bhgqs,bq->bhs", share, weights.to(share.dtype))


def attention_scores(
    queries: Tensor,
    slots: Slots,
    scaling: float | None,
    softcap: float | None,
    mask: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Scores ``[batch, kv_heads, group, q, slots]``, -inf where masked."""
    batch, heads, num_queries, head_dim = queries.shape
    kv_heads = slots.keys.shape[1]
    group = heads // kv_heads
    dtype = compute_dtype(queries.dtype)
    scale = head_dim**-0.5 if scaling is None else scaling
    scores = torch.matmul(
        (queries.to(dtype) * scale).reshape(batch, kv_heads, group * num_queries, head_dim),
        slots.keys.to(dtype).transpose(-1, -2),
    ).view(batch, kv_heads, group, num_queries, slots.count)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if slopes is not None:
        assert slots.positions is not None
        # Softmax ignores a constant: measure positions from the newest to keep numbers small.
        distance = slots.positions - slots.positions.amax(-1, keepdim=True)
        scores += slopes.to(dtype).view(1, kv_heads, group, 1, 1) * distance[:, :, None, None, :]
    if mask is not None:
        if mask.shape[1] == 1:  # the same for every head
            hidden = ~mask.unsqueeze(2)
        else:
            hidden = ~mask.expand(batch, heads, num_queries, slots.count).reshape(scores.shape)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def per_group(sinks: Tensor, kv_heads: int, queries: Tensor) -> Tensor:
    """Sinks broadcastable to scores, ``[1, kv_heads, group, 1, 1]``.

    Raises:
        InputError: not one number per attention head of ``queries``.
    """
    if sinks.shape != queries.shape[1:2]:
        raise InputError(f"sinks must have shape ({queries.shape[1]},), got {tuple(sinks.shape)}")
    return sinks.to(compute_dtype(queries.dtype)).view(1, kv_heads, -1, 1, 1)


def _weights(
    scores: Tensor, mass: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """exp(scores), shifted so that nothing overflows; m broadcastable to it; exp(sink), shifted
    equally."""
    shiftable = scores
    if mass is not None:
        mass = mass.to(scores.dtype)[:, :, None, None, :]
        shiftable = scores.masked_fill(mass == 0, -torch.inf)
    shift = shiftable.amax(-1, keepdim=True)
    if sink is not None:
        shift = torch.maximum(shift, sink)
    shift = torch.where(torch.isfinite(shift), shift, 0.0)
    exponent = scores.sub_(shift)
    if mass is not None:
        exponent.clamp_(max=_MAX_EXPONENT)
    return exponent.exp_(), mass, None if sink is None else (sink - shift).exp()


def query_blocks(queries: Tensor, num_slots: int) -> list[slice]:
    """Parts of the queries ``[batch, heads, q, head_dim]`` whose scores against ``num_slots`` slots
    are few enough to form at a time."""
    batch, heads, num_queries, _ = queries.shape
    rows = max(1, at_once(queries, _BLOCK_SCORES) // max(1, batch * heads * num_slots))
    return [slice(i, min(i + rows, num_queries)) for i in range(0, num_queries, rows)]


def check_queries(queries: Tensor, slots: Slots, slopes: Tensor | None) -> None:
    if queries.dim() != 4:
        raise InputError(
            f"queries must be [batch, num_attention_heads, q, head_dim], got {tuple(queries.shape)}"
        )
    batch, heads, _, head_dim = queries.shape
    if batch != slots.keys.shape[0] or head_dim != slots.keys.shape[3]:
        raise InputError(
            f"queries {tuple(queries.shape)} do not fit keys {tuple(slots.keys.shape)}: batch and "
            "head_dim must be equal"
        )
    if heads % slots.keys.shape[1]:
        raise InputError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads="
            f"{slots.keys.shape[1]}"
        )
    if slopes is not None and slots.positions is None:
        raise InputError("slopes (ALiBi) need slots.positions")
    if slopes is not None and slopes.shape != (heads,):
        raise InputError(f"slopes must have shape ({heads},), got {tuple(slopes.shape)}")
