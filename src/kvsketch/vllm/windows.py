"""Layers with a sliding window, whose last tokens vLLM keeps in blocks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.slots import Slots


def window_layers(config: Any) -> dict[int, Any]:
    """The layers with a sliding window in this process, by their number in the model. All layers
    must exist already.

    Args:
        config: ``VllmConfig``.
    """
    modules = config.compilation_config.static_forward_context.items()
    found = [(name, one) for name, one in modules if getattr(one, "sliding_window", None)]
    return {extract_layer_index(name): layer for name, layer in found}


def check_window(layer: Any, number: int, window: Slots | None, seen: int) -> None:
    """Raise unless the tokens of a file are those of a layer's window.

    Args:
        layer: with a sliding window.
        number: of the layer.
        window: its last tokens after ``seen`` tokens, ``[1, heads, n, head_dim]``.

    Raises:
        InputError: the file has none, or of another shape.
        UnsupportedError: the layer's backend has no way to write them.
    """
    impl, kept = layer.impl, min(seen, layer.sliding_window - 1)
    shape = (1, impl.num_kv_heads, kept, impl.head_size)
    found = None if window is None else tuple(window.keys.shape)
    if window is None or found != shape or tuple(window.values.shape) != shape:
        raise InputError(
            f"layer {number} has a sliding window of the shape {shape}, and the file one of {found}"
        )
    if not hasattr(impl, "do_kv_cache_update"):
        raise UnsupportedError(
            f"layer {number} has a sliding window, and {type(impl).__name__} cannot write into it"
        )


def write_window(
    layer: Any, window: Slots, seen: int, blocks: Sequence[int], size: int, dtype: torch.dtype
) -> None:
    """Write the tokens of a window into a request's blocks, as the layer's backend does.

    Args:
        window: the last tokens of ``seen``.
        blocks: of the request, of ``size`` tokens each; before the window, any.
        dtype: of the model.
    """
    # From the start of a block: a kernel reads whole ones, which must be finite.
    before = (seen - window.count) % size
    places = torch.arange(seen - window.count - before, seen, device="cpu")
    slots = torch.tensor(blocks, device="cpu")[places // size] * size + places % size
    cache: Tensor = layer.kv_cache

    def tokens(tensor: Tensor) -> Tensor:
        own = tensor[0].transpose(0, 1).to(cache.device, dtype)
        return torch.cat([own.new_zeros(before, *own.shape[1:]), own])

    own = tokens(window.keys), tokens(window.values)
    layer.impl.do_kv_cache_update(layer, *own, cache, slots.to(cache.device))
