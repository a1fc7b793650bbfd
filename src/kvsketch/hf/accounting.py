"""What the layers of a cache hold: slots, bytes, errors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..cache.stream import Stream
from .hybrid_layer import linear_states
from .layer import SketchLayer


def held(layer: Any) -> float:
    if isinstance(layer, SketchLayer):
        return float(layer.stream.held.double().mean()) if layer.stream.seen else 0
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.dim() < 4 else int(keys.shape[2])


def exact_heads(layer: Any) -> list[int]:
    """KV heads of a compressible layer that hold all tokens, in every row."""
    if not isinstance(layer, SketchLayer) or not layer.stream.seen:
        return []
    held = layer.stream.held.amin(0).tolist()
    return [head for head, count in enumerate(held) if count >= layer.stream.seen]


def bits(layer: Any) -> dict[str, int] | None:
    """Of a compressible layer's keys and values between sinks and recent window."""
    return layer.stream.bits._asdict() if isinstance(layer, SketchLayer) else None


def errors(stream: Stream, error: Tensor | None) -> list[float] | None:
    if error is not None:
        largest: list[float] = error.amax(0).tolist()
        return largest
    if stream.compressed or not stream.seen:
        return None
    return [0.0] * stream.slots.keys.shape[1]


def tokens(layer: Any) -> int:
    """Tokens a layer has seen; 0 for one that does not count them (a linear-attention state, or
    one that holds nothing of its own)."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def layer_nbytes(layer: Any) -> int:
    if isinstance(layer, SketchLayer):
        tensors = layer.tensors()
    else:
        both = (getattr(layer, "keys", None), getattr(layer, "values", None))
        tensors = [t for t in both if t is not None]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors += linear_states(layer)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def exact_nbytes(layer: Any) -> int:
    if not isinstance(layer, SketchLayer):
        return layer_nbytes(layer)
    exact = layer.stream.seen * layer.token_bytes
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        exact += sum(state.nbytes for state in linear_states(layer))
    return exact
