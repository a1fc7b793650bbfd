"""Slots, bytes and errors of the layers of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvsketch.cache.stream import Stream
from kvsketch.hf.hybrid_layer import linear_states
from kvsketch.hf.layer import SketchLayer


def held(layer: Any) -> float:
    if isinstance(layer, SketchLayer):
        return float(layer.stream.held.double().mean()) if layer.stream.seen else 0
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.dim() < 4 else int(keys.shape[2])


def exact_heads(layer: Any) -> list[int]:
    """KV heads of a compressible layer that keep all tokens, in every row."""
    if not isinstance(layer, SketchLayer) or not layer.stream.seen:
        return []
    held = layer.stream.held.amin(0).tolist()
    return [head for head, count in enumerate(held) if count >= layer.stream.seen]


def bits(layer: Any) -> dict[str, int] | None:
    """Of a compressible layer's keys and values between sinks and recent window."""
    return layer.stream.pace.bits._asdict() if isinstance(layer, SketchLayer) else None


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
    """Bytes of a layer's tensors; of a window, those of its tokens: until more tokens follow,
    transformers' tensors are views of all tokens that were read with them."""
    if not isinstance(layer, SketchLayer):
        both = (getattr(layer, "keys", None), getattr(layer, "values", None))
        states = linear_states(layer) if isinstance(layer, LinearAttentionCacheLayerMixin) else []
        return sum(t.nbytes for t in (*both, *states) if t is not None)
    tensors = layer.tensors()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def exact_nbytes(layer: Any) -> int:
    if not isinstance(layer, SketchLayer):
        return layer_nbytes(layer)
    exact = layer.stream.seen * layer.token_bytes
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        exact += sum(state.nbytes for state in linear_states(layer))
    return exact


def mean_held(layers: Sequence[Any]) -> float:
    """Slots per KV head, the mean over compressible layers."""
    found = [held(layer) for layer in layers if isinstance(layer, SketchLayer)]
    return sum(found) / len(found)


def alone(layers: Sequence[Any]) -> Tensor | None:
    """The share of KV heads, over compressible layers, in which each token has a slot of its own,
    float32 ``[batch, tokens]``. None: positions are not stored."""
    found = []
    for layer in layers:
        if not isinstance(layer, SketchLayer):
            continue
        slots, seen = layer.stream.slots, layer.stream.seen
        if slots.positions is None:
            return None
        # Where several tokens share a slot, it is at their mean position and has their mass.
        place = slots.positions.round()
        own = (place == slots.positions) & (slots.masses() > 0) & (slots.masses() < 1.5)
        place = torch.where(own, place, seen).long().flatten(1)
        count = torch.zeros(len(place), seen + 1, dtype=torch.float32, device=place.device)
        count.scatter_add_(1, place, own.float().flatten(1))
        found.append(count[:, :seen].cpu() / slots.keys.shape[1])
    return torch.stack(found).mean(0)


def by_layer(layers: Sequence[Any], above: Mapping[int, Tensor] | None) -> list[dict[str, Any]]:
    """What ``SketchCache.summary`` says of every layer.

    Args:
        above: heads that exceed the tolerance, by number of the compressible layer; None: there is
            no tolerance.
    """
    rows = [
        {
            "layer": index,
            "compressed": isinstance(layer, SketchLayer) and layer.stream.compressed,
            "tokens": tokens(layer),
            "slots": held(layer),
            "bits": bits(layer),
            "exact_heads": exact_heads(layer),
            "kv_bytes": layer_nbytes(layer),
            "exact_kv_bytes": exact_nbytes(layer),
        }
        for index, layer in enumerate(layers)
    ]
    if above is not None:
        numbers = [i for i, layer in enumerate(layers) if isinstance(layer, SketchLayer)]
        for number, index in enumerate(numbers):
            heads = above.get(number)
            found = [] if heads is None else heads.nonzero().flatten().tolist()
            rows[index]["above_tolerance"] = found
    return rows


def mean_error(layers: Sequence[Any]) -> float | None:
    """The error of a prompt's compression, the mean over layers, rows and KV heads; None if nothing
    was measured."""
    found = [layer.stream.errors.prompt for layer in layers if isinstance(layer, SketchLayer)]
    flat = [error.flatten().cpu() for error in found if error is not None]
    return float(torch.cat(flat).mean()) if flat else None


def measured(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """See ``SketchCache.error``."""
    rows = []
    for index, layer in enumerate(layers):
        if isinstance(layer, SketchLayer):
            stream = layer.stream
            rows.append(
                {
                    "layer": index,
                    "prompt": errors(stream, stream.errors.prompt),
                    "now": errors(stream, stream.running_error),
                }
            )
    return rows


def known_error(layers: Sequence[Any]) -> tuple[list[float], bool]:
    """The present error of every compressible layer and KV head that is known, and True; where it
    is not tracked, that of the prompt, and False."""
    rows = measured(layers)
    now = all(row["now"] is not None for row in rows)
    found = [row["now"] if now else row["prompt"] for row in rows]
    return [error for row in found if row is not None for error in row], now
