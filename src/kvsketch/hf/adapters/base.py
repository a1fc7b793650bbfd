"""What the adapters have in common: a forward of ours in front of an attention module's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from kvsketch.errors import KVSketchError
from kvsketch.hf import interface
from kvsketch.hf.attention import attend_in_pieces, attend_slots
from kvsketch.hf.layer import SketchLayer
from kvsketch.observed import Observed


@dataclass(frozen=True)
class Adapter:
    """How a family's attention becomes ours.

    Attributes:
        install: wraps its attention module, once per process; other caches are not affected.
        needs_positions: whether slots must remember where they came from (ALiBi).
    """

    install: Callable[[], None]
    needs_positions: bool = False


def wrap(
    module_class: type[nn.Module],
    cache_of: Callable[..., Any],
    asked_of: Callable[..., tuple[Observed, Any]],
    project: Callable[..., tuple[Tensor, Tensor]],
    finish: Callable[..., Any],
) -> None:
    """Give ``module_class`` a forward that attends to slots once its layer is compressed.

    Args:
        cache_of: the cache among the forward's arguments, or None. This and the others are called
            with the module and the forward's arguments.
        asked_of: the queries of these tokens, and their mask as ``masks.Masks.read`` takes it.
        project: their keys and values, as the module hands them to the cache.
        finish: ``finish(context, module, ...)``: what the forward returns, given the attention
            ``[batch, q, num_attention_heads * value_dim]``.
    """
    original = module_class.forward
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(self, *args, **kwargs)
        layers = getattr(cache, "layers", None)
        layer = layers[self.layer_idx] if layers and self.layer_idx < len(layers) else None
        if not isinstance(layer, SketchLayer):
            return original(self, *args, **kwargs)
        if layer.stream.compressed:
            cache.update(*project(self, *args, **kwargs), self.layer_idx)
            return ours(self, cache._forward, layer, None, *args, **kwargs)
        result = original(self, *args, **kwargs)
        return ours(self, cache._forward, layer, result, *args, **kwargs)

    @interface.uncompiled
    def ours(
        self: Any, running: Any, layer: SketchLayer, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """What the forward returns.

        Args:
            running: the ``Forward`` of the cache.
            result: the module's own of a layer that is not compressed.
        """
        compressed = layer.stream.compressed
        interface.close(layer)
        try:
            layer.claim(self)
            asked, mask = asked_of(self, *args, **kwargs)
            batch, _, q, _ = asked.queries.shape
            view = running.masks.read(mask, batch, q, layer.stream.seen)
            layer.mark(view)
            observed = replace(asked, queries=asked.queries.detach(), live=view.causal)
            sizes = layer.cuts(view, running.soon(layer))
            if len(sizes) > 1:
                settle = functools.partial(running.settle, layer, prefill=True)
                out, observed = attend_in_pieces(layer, observed, view, sizes, settle)
            elif compressed:
                out = attend_slots(layer, asked, view)
            if compressed or len(sizes) > 1:
                result = finish(out.transpose(1, 2).flatten(2), self, *args, **kwargs)
            running.observe(layer, None if layer.lossless else observed)
        except KVSketchError:
            running.undo()
            raise
        return result

    forward._kvsketch = True  # type: ignore[attr-defined]
    module_class.forward = forward
