"""The attention of a layer while ``prefill`` reads a context again, and the end of that forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsketch.estimator import attend
from kvsketch.observed import Observed, causal
from kvsketch.reread import attend_again, fits, looked_at
from kvsketch.slots import Slots

if TYPE_CHECKING:
    from kvsketch.hf.forward import Again
    from kvsketch.hf.layer import SketchLayer

Usual = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor | None]]


class ReadEnough(Exception):
    """Every layer has seen a part's queries: the rest of the forward is not needed."""


def attention(
    layer: SketchLayer,
    again: Again,
    name: str,
    asked: Observed,
    plain: bool,
    mask: Any,
    usual: Usual,
) -> tuple[Tensor, Tensor | None, Observed]:
    """Attention of a part of a second reading over an uncompressed layer.

    Args:
        layer: whose newest tokens are the part.
        again: what is read again.
        name: of the kernel the model requested; in the place of torch's own, faster ones will do.
        asked: the queries of the part.
        plain: whether the model's mask is a causal one.
        mask: it, over all tokens, or None (see ``widened``).
        usual: the model's kernel, of keys, values and mask.

    Returns:
        ``[batch, q, num_attention_heads, value_dim]``, the kernel's weights where it ran, and the
        queries with what the kernel has found out about them.
    """
    stream, q = layer.stream, asked.queries.shape[2]
    slots, about = stream.slots, again.about
    # Full attention is computed only because later layers need its output.
    everything = not again.local and not (again.stops and layer.forward.is_last(layer))
    alone = layer.settings.readers == 1
    simple = plain and alone and not stream.padded and not torch.is_grad_enabled()
    if name == "sdpa" and simple and fits(asked, slots):
        out, total = attend_again(asked, slots, about, everything)
        return out.transpose(1, 2).contiguous(), None, replace(asked, total=total)
    if again.local:
        near = Slots.cat(looked_at(stream.visible, about, q))
        sees = causal(q, near.count, asked.queries.device)
        out = attend(
            asked.queries,
            near,
            scaling=asked.scaling,
            softcap=asked.softcap,
            mask=sees,
            sinks=asked.sinks,
        )
        return out.transpose(1, 2).contiguous(), None, asked
    if mask is None and again.unmasked and name == "sdpa":
        mask = causal(q, slots.count, asked.queries.device)
    return *usual(slots.keys, slots.values, mask), asked


def widened(mask: Any, seen: int) -> Any:
    """A mask that a model has made over the newest tokens alone (``SketchLayer.get_mask_sizes``),
    as one over all ``seen`` tokens: those before are visible. None stays None: a causal mask."""
    if not isinstance(mask, Tensor) or mask.shape[-1] == seen:
        return mask
    shape = (*mask.shape[:-1], seen - mask.shape[-1])
    boolean = mask.dtype == torch.bool
    earlier = mask.new_ones(shape) if boolean else mask.new_zeros(shape)
    return torch.cat([earlier, mask], dim=-1)
