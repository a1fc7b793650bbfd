"""What the layers of a cache hold: slots, bytes, errors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..streaming import HeadGroups, Periodic
from .layer import SketchLayer


def held(layer: Any) -> float:
    if isinstance(layer, SketchLayer):
        return layer.sketch.held if layer.sketch.seen else 0
    keys = layer.keys
    return 0 if keys is None or keys.dim() < 4 else int(keys.shape[2])


def exact_heads(layer: Any) -> list[int]:
    """KV heads of a compressible layer that hold all tokens."""
    if not isinstance(layer, SketchLayer) or not layer.sketch.seen:
        return []
    if isinstance(layer.sketch, HeadGroups):
        held = layer.sketch.held_by_head
    else:
        held = [layer.sketch.held] * layer.sketch.slots.keys.shape[1]
    return [head for head, count in enumerate(held) if count >= layer.sketch.seen]


def errors(sketch: Periodic | HeadGroups, error: Tensor | None) -> list[float] | None:
    if error is not None:
        largest: list[float] = error.amax(0).tolist()
        return largest
    if sketch.compressed or not sketch.seen:
        return None
    return [0.0] * sketch.slots.keys.shape[1]


def layer_nbytes(layer: Any) -> int:
    if isinstance(layer, SketchLayer):
        tensors = layer.sketch.tensors()
    else:
        tensors = [t for t in (layer.keys, layer.values) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def exact_nbytes(layer: Any) -> int:
    if not isinstance(layer, SketchLayer):
        return layer_nbytes(layer)
    return layer.sketch.seen * layer.token_bytes
