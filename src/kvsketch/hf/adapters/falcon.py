"""Falcon with rotary positions: no attention interface in transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from kvsketch.hf.adapters.base import Adapter, wrap
from kvsketch.observed import Observed


def install() -> None:
    """Let every FalconAttention work with SketchCache; other caches are not affected."""
    wrap(FalconAttention, _cache, _asked, _keys_and_values, _finish)


ADAPTER = Adapter(install)


def _cache(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    return layer_past


def _asked(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **__: Any,
) -> tuple[Observed, Any]:
    queries = _project(module, hidden_states, position_embeddings)[0]
    return Observed(queries, module.inv_norm_factor), attention_mask


def _keys_and_values(
    module: Any, hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any
) -> Any:
    return _project(module, hidden_states, position_embeddings)[1:]


def _project(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    mixed = module._split_heads(module.query_key_value(hidden_states))
    queries, keys, values = (part.transpose(1, 2) for part in mixed)
    queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
    return queries, keys, values


def _finish(context: Tensor, module: Any, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return module.dense(context), None
