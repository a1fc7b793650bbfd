"""Attention of packed queries over one set of tokens, with the log of its total. All fast forms of
attention over slots combine such pieces.

The parts of a context can be attended to one by one: with outputs z_i and totals t_i of the parts,
the attention over all of them is sum_i t_i z_i / sum_i t_i. A mass m is a bias of log m on the
score of its slot, if the slot's value is the mean u / m.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.slots import compute_dtype

#: Used as the log of a mass of 0: exp of it is 0, and the difference of two of them is not NaN.
NOTHING = -1e30

# Scores that are computed at a time if no fused kernel can be used: 256 MB in float32.
_SCORES = 1 << 26

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def log_mass(mass: Tensor) -> Tensor:
    """log m, or ``NOTHING`` where m is 0."""
    return mass.log().clamp_(min=NOTHING)


def partial(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the keys of its group.

    Args:
        queries: ``[rows, heads, q, head_dim]``, all queries that read the same keys side by side.
        keys: ``[rows, heads, n, head_dim]``, n >= 1; values ``[rows, heads, n, value_dim]``. In
            another dtype than the queries they are converted.
        bias: added to the scores, ``[rows, heads, 1 or q, n]`` or broadcastable to that shape.
        scaling: multiplies ``<q, k>``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the bias.
        is_causal: query i attends to keys 0 .. i only (as many queries as keys, no bias).

    Returns:
        The attention, in the dtype of the queries, and the log of the summed weights, float32 or
        float64 ``[rows, heads, q]``.
    """
    if keys.dtype != queries.dtype:
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    fused = softcap is None and queries.device.type == "cpu"
    if fused and _FLASH is not None and keys.shape[3] == values.shape[3]:
        if bias is not None:
            shape = (*queries.shape[:3], keys.shape[2])
            # float64 scores with a float32 bias come out wrong; 16 bits are too few for log m
            wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
            bias = (bias if bias.dtype == wide else bias.to(wide)).expand(shape)
        found: tuple[Tensor, Tensor] = _FLASH(
            queries, keys, values, 0.0, is_causal, attn_mask=bias, scale=scaling
        )
        return found
    dtype, count = compute_dtype(queries.dtype), queries.shape[2]
    keys, values = keys.to(dtype), values.to(dtype)
    number = torch.arange(keys.shape[2], device=keys.device)
    step = max(1, _SCORES // max(1, queries[:, :, 0, 0].numel() * keys.shape[2]))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        scores = (queries[:, :, some].to(dtype) * scaling) @ keys.mT
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores += bias if bias.shape[2] == 1 else bias[:, :, some]
        if is_causal:
            scores.masked_fill_(number > number[some].unsqueeze(-1), NOTHING)
        log_total = scores.logsumexp(-1)
        out = scores.sub_(log_total.unsqueeze(-1)).exp_() @ values
        parts.append((out.to(queries.dtype), log_total))
    if len(parts) == 1:
        return parts[0]
    outs, totals = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(totals, dim=2)


def together(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The attention over all parts, from the attention over each (as ``partial`` returns it)."""
    if len(parts) == 1:
        return parts[0]
    totals = torch.stack([total for _, total in parts])
    whole = totals.logsumexp(0)
    weights = (totals - whole).exp_().unsqueeze(-1)
    dtype = parts[0][0].dtype
    out = sum(part.to(weights.dtype) * w for (part, _), w in zip(parts, weights, strict=True))
    assert isinstance(out, Tensor)
    return out.to(dtype), whole
