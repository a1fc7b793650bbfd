"""BLOOM: ALiBi positions, and no attention interface in transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    build_alibi_tensor,
    dropout_add,
)

from kvsketch.hf.adapters.base import Adapter, wrap
from kvsketch.observed import Observed


def install() -> None:
    """Let every BloomAttention work with SketchCache; other caches are not affected."""
    wrap(BloomAttention, _cache, _asked, _keys_and_values, _finish)


ADAPTER = Adapter(install, needs_positions=True)


def _cache(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **_: Any,
) -> Any:
    return layer_past


def _asked(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Observed, Any]:
    # The slopes do not depend on the tokens: padding shifts a row's positions by a constant.
    two = alibi.new_ones(1, 2)
    slopes = build_alibi_tensor(two, module.num_heads, alibi.dtype)[:, 0, 1] * module.beta
    queries = _project(module, hidden_states)[0]
    return Observed(queries, module.inv_norm_factor, slopes=slopes), attention_mask


def _keys_and_values(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    return _project(module, hidden_states)[1:]


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    projected: tuple[Tensor, ...] = module._reshape(module.query_key_value(hidden_states))
    return projected


def _finish(
    context: Tensor, module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    out = module.dense(context)
    return dropout_add(out, residual, module.hidden_dropout, module.training), None
