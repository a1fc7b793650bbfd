"""attend() for one query token over slots that are all live: what every decoded token pays."""

from __future__ import annotations

import torch
from torch import Tensor

from ..slots import Slots


def attend_one(
    queries: Tensor, slots: Slots, *, scaling: float, score: Tensor | None = None
) -> Tensor:
    """``attend`` in half the operations: softmax over the slots, then its product with u over its
    product with m.

    The softmax shift comes from all slots, so a dead one with a score far above the rest would
    underflow them: use ``attend`` where there is padding.

    Args:
        queries: float32 or float64 ``[batch, num_attention_heads, 1, head_dim]``.
        score: ``[batch, num_key_value_heads, slots]``; the attention each slot receives, summed
            over the query heads of its group, is added to it in place.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]``.
    """
    batch, heads, _, head_dim = queries.shape
    kv_heads = slots.keys.shape[1]
    packed = queries.reshape(batch, kv_heads, heads // kv_heads, head_dim) * scaling
    weights = torch.matmul(packed, slots.keys.transpose(-1, -2)).softmax(-1)
    out = torch.matmul(weights, slots.values)
    if slots.mass is not None:
        weights = weights * slots.mass.unsqueeze(2)
        total = weights.sum(-1, keepdim=True)
        out = out / total
        weights = weights / total if score is not None else weights
    if score is not None:
        score += weights.sum(2)
    return out.reshape(batch, heads, 1, slots.values.shape[-1])
