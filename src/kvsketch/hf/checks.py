"""Checks of new tokens and queries, before a layer changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import InputError
from ..methods.base import all_finite

if TYPE_CHECKING:
    from .layer import SketchLayer


def check_tokens(layer: SketchLayer, keys: Tensor, values: Tensor) -> None:
    """Raise InputError unless new keys and values ``[batch, num_key_value_heads, q, head_dim]`` fit
    the layer's tokens; a chunk of a prompt must be finite."""
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise InputError(
            "keys and values must be [batch, num_key_value_heads, q, head_dim], got "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    budget = layer.stream.budget
    if budget is not None and budget.even is None and budget.heads != keys.shape[1]:
        raise InputError(
            f"schedule or allocation has {budget.heads} KV heads, this process holds "
            f"{keys.shape[1]}: under tensor parallelism give one share per layer"
        )
    if layer.stream.seen:
        held = layer.token_shape
        if keys.shape[:2] != held[:2] or keys.shape[3] != held[3]:
            raise InputError(
                f"keys {tuple(keys.shape)} do not fit the cache, which holds {held} per "
                "token: batch, heads and head_dim must be equal"
            )
        if keys.dtype != layer.dtype or keys.device != layer.device:
            raise InputError(
                f"keys are {keys.dtype} on {keys.device}, the cache holds {layer.dtype} on "
                f"{layer.device}"
            )
    if keys.shape[2] > 1:  # decoded tokens are checked when they are compressed
        for name, tensor in (("keys", keys), ("values", values)):
            if not all_finite(tensor):
                raise InputError(f"{name} are not finite (NaN or infinity); cache unchanged")


def check_queries(layer: SketchLayer, queries: Tensor) -> None:
    """Raise InputError unless ``[batch, num_attention_heads, q, head_dim]`` fits the keys."""
    batch, heads = layer.token_shape[:2]
    dim = layer.key_dim
    if queries.shape[0] != batch or queries.shape[3] != dim or queries.shape[1] % heads:
        raise InputError(
            f"queries {tuple(queries.shape)} do not fit keys of {batch} rows, {heads} KV heads "
            f"and head_dim={dim}: batch and head_dim must be equal, and the number of "
            "attention heads a multiple of the KV heads"
        )
    layer.query_shape = queries.shape
