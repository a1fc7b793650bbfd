"""MPT: ALiBi positions, and no attention interface in transformers.

MPT's attention adds a bias that depends on the distance between query and key, so slots must
remember where they came from. ``install`` gives MptAttention a forward that attends to slots when
its cache is a compressed SketchCache and is the original one otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from ..slots import Observed
from ..streaming.head_groups import HeadGroups
from .attention import attend_chunk, attend_groups, live_tail
from .layer import SketchLayer

__all__ = ["MptConfig", "install", "slopes_of"]


def install() -> None:
    """Let every MptAttention work with SketchCache; other caches are not affected."""
    original = MptAttention.forward
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layers = getattr(past_key_values, "layers", None)
        layer = layers[self.layer_idx] if layers and self.layer_idx < len(layers) else None
        if not isinstance(layer, SketchLayer):
            out: tuple[Tensor, Tensor | None] = original(
                self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs
            )
            return out
        query = _queries(self, hidden_states)
        # MPT's mask is True where a query may NOT look.
        live = live_tail(None if attention_mask is None else ~attention_mask, query.shape[2])
        slopes = slopes_of(self.n_heads, position_bias)
        if layer.sketch.compressed:
            context = _attend(self, hidden_states, query, layer, past_key_values, live, slopes)
            result = (self.out_proj(context), None)
        else:
            result = original(
                self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs
            )
            if live is not None:
                layer.sketch.mark_padding(live)
        layer.after_attention(Observed(query, self.softmax_scale, slopes=slopes, live=live))
        return result

    forward._kvsketch = True  # type: ignore[attr-defined]
    MptAttention.forward = forward


def slopes_of(num_heads: int, position_bias: Tensor) -> Tensor:
    """ALiBi slopes ``[num_heads]``: what the bias gains per position."""
    if position_bias.shape[-1] < 2:
        position_bias = build_mpt_alibi_tensor(num_heads, 2, device=position_bias.device)
    return position_bias[:, 0, -1] - position_bias[:, 0, -2]


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4))


def _queries(module: Any, hidden_states: Tensor) -> Tensor:
    return _project(module, hidden_states)[0]


def _attend(
    module: Any,
    hidden_states: Tensor,
    query: Tensor,
    layer: SketchLayer,
    cache: Any,
    live: Tensor | None,
    slopes: Tensor,
) -> Tensor:
    _, keys, values = _project(module, hidden_states)
    cache.update(keys, values, module.layer_idx)
    if live is not None:
        layer.sketch.mark_padding(live)
    sketch, scaling = layer.sketch, float(module.softmax_scale)
    if isinstance(sketch, HeadGroups):
        out = attend_groups(query, sketch, scaling, slopes=slopes)
    else:
        out = attend_chunk(query, sketch.slots, scaling, slopes=slopes)
    return out.transpose(1, 2).flatten(2)
