"""attend() through torch's own scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..slots import Slots


def attend_sdpa(
    queries: Tensor, slots: Slots, *, scaling: float, mask: Tensor | None = None
) -> Tensor:
    """``attend`` for slots whose value-sum is m times a value, so that m = 0 means u = 0.

    Then ``log m`` is a bias on the scores and ``u / m`` the value, and any softmax attention
    kernel does it. Not for slots that serve the numerator only (m = 0, u != 0): they would be
    dropped.

    Args:
        queries: float32 or float64 ``[batch, num_attention_heads, q, head_dim]`` (in lower
            precision the bias would be rounded; use ``attend``).
        mask: bool ``[1, 1, q, slots]``, True where a query may look. Every query must see mass.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``.
    """
    batch, heads, num_queries, _ = queries.shape
    kv_heads = slots.keys.shape[1]
    group = heads // kv_heads
    values, bias = slots.values, None
    if slots.mass is not None:
        mass = slots.mass.to(queries.dtype)
        bias = mass.log().unsqueeze(2)
        # the smallest number only meets u = 0, where it keeps 0 / 0 from being NaN
        values = values / mass.clamp(min=torch.finfo(mass.dtype).tiny).unsqueeze(-1)
    if mask is not None:
        hidden = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, -torch.inf)
        bias = hidden if bias is None else bias + hidden
        # query rows run group-major, see below
        bias = bias.repeat(1, 1, group, 1).expand(batch, kv_heads, -1, -1)
    # The queries of one group share a KV head: fold the group into the query axis, no copies.
    packed = queries.reshape(batch, kv_heads, group * num_queries, queries.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        packed, slots.keys, values, attn_mask=bias, scale=scaling
    )
    return out.reshape(batch, heads, num_queries, values.shape[-1])
