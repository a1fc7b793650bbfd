"""attend() for one query token over slots that are all live: what every decoded token pays."""

from __future__ import annotations

import torch
from torch import Tensor

from ..slots import Slots, per_group


def attend_one(
    queries: Tensor,
    slots: Slots,
    *,
    scaling: float,
    score: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attend`` in half the operations: softmax over the slots, then its product with u over its
    product with m.

    The softmax shift comes from all slots, so a dead one with a score far above the rest would
    underflow them: use ``attend`` where there is padding.

    Args:
        queries: float32 or float64 ``[batch, num_attention_heads, 1, head_dim]``.
        score: ``[batch, num_key_value_heads, slots]``; the attention each slot receives, summed
            over the query heads of its group, is added to it in place.
        sinks: ``[num_attention_heads]``, logits of attention sinks, as in ``attend``.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]``.
    """
    batch, heads, _, head_dim = queries.shape
    kv_heads = slots.keys.shape[1]
    packed = queries.reshape(batch, kv_heads, heads // kv_heads, head_dim) * scaling
    scores, taken = torch.matmul(packed, slots.keys.transpose(-1, -2)), None
    if sinks is not None:  # one more column, which takes its share and has no slot
        sink = per_group(sinks, kv_heads, queries)[..., 0].expand(batch, -1, -1, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)
        weights, taken = weights[..., :-1], weights[..., -1:]
    else:
        weights = scores.softmax(-1)
    out = torch.matmul(weights, slots.values)
    if slots.mass is not None:
        weights = weights * slots.mass.unsqueeze(2)
        total = weights.sum(-1, keepdim=True)
        total = total if taken is None else total + taken
        out = out / total
        weights = weights / total if score is not None else weights
    if score is not None:
        score += weights.sum(2)
    return out.reshape(batch, heads, 1, slots.values.shape[-1])
