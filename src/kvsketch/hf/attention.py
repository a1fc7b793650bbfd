"""The attention of a layer whose cache is a SketchCache.

It runs the model's own kernel while the layer is uncompressed, attends to slots afterwards, and
then lets the layer compress. Every argument a model passes is accounted for: used, known to say
nothing about slots, or refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..slots import Observed
from .compressed import Asked, attend_compressed

if TYPE_CHECKING:
    from .interface import Kernel
    from .layer import SketchLayer

# Kernels that attend to the keys they are given, whatever the cache; without a mask, to all.
_PLAIN_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

# Arguments that say nothing about how a query attends to a key; transformers hands them through.
OF_THE_FORWARD = frozenset(
    {
        "cache_position",
        "head_mask",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",  # has a check of its own
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",  # keys and queries are rotated already
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)


def attention(
    layer: SketchLayer,
    kernel: Kernel,
    name: str,
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model's attention module calls instead of ``kernel``.

    Args:
        layer: whose keys and values ``key`` and ``value`` are.
        kernel: the function the model asked for by ``name``.
        module: the attention module; None in a compiled graph that is run before any other forward.
        query: ``[batch, num_attention_heads, q, head_dim]``.
        attention_mask: see ``masks.Masks.read``.
        s_aux: ``[num_attention_heads]``, logits of attention sinks.

    Returns:
        ``[batch, q, num_attention_heads, value_dim]``, and the kernel's weights where it ran.

    Raises:
        UnsupportedError: an argument or a mask that compressed attention cannot honour.
        InputError: a cache of another model.
    """
    layer.check_returned(module, key, value)
    for given, number in (("softcap", softcap), ("s_aux", s_aux)):
        if number is not None:
            kwargs[given] = number

    def usual(keys: Tensor, values: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        return kernel(module, query, keys, values, mask, *args, scaling=scaling, **kwargs)

    if layer.settings.lossless:  # nothing to account for: the kernel gets it all
        out, weights = usual(key, value, attention_mask)
        layer.after_attention(None)
        return out, weights
    if module is not None:  # a graph has checked what it hands on
        check_arguments(layer, module, args, kwargs)
    sketch, q = layer.sketch, query.shape[2]
    asked = layer.to_slots(module, query)
    layer.check_queries(asked)
    view = layer.forward.masks.read(attention_mask, query.shape[0], q, sketch.seen)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.mark(view)
    observed = None
    if layer.wants_queries():
        observed = Observed(asked.detach(), scale, softcap, live=view.causal, sinks=s_aux)
    if not sketch.compressed:
        out, weights = usual(key, value, attention_mask)
        layer.after_attention(observed)
        return out, weights
    exactly = None
    if q == 1 and name in _PLAIN_KERNELS and asked is query:

        def exactly(keys: Tensor, values: Tensor) -> Tensor:
            return usual(keys, values, None)[0].transpose(1, 2)

    asks = Asked(asked, scale, softcap, None, s_aux, exactly, layer.counts_attention)
    out, counted = attend_compressed(asks, sketch, view)
    out = layer.from_slots(module, out)
    layer.after_attention(None if counted else observed)
    return out.transpose(1, 2).contiguous(), None


def check_arguments(
    layer: SketchLayer, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise unless compressed attention can honour every argument.

    Raises:
        UnsupportedError: an argument it does not know, or one that it cannot honour.
    """
    what = type(module).__name__
    if args:
        raise UnsupportedError(f"{what} passes {len(args)} arguments to attention without a name")
    if kwargs.get("output_attentions") and layer.sketch.compresses_next(layer.pending):
        raise UnsupportedError(
            "output_attentions=True asks for a weight per token, and this cache is compressed: a "
            "slot is no token. Use DynamicCache, or a budget >= the number of tokens"
        )
    training = module.training and torch.is_grad_enabled()
    if training or (module.training and kwargs.get("dropout")):
        raise UnsupportedError(
            "the model is in training mode; gradients do not flow through compressed slots and "
            "dropout does not reach them: call model.eval()"
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < layer.sketch.seen:
        raise UnsupportedError(
            f"sliding_window={window} is shorter than the {layer.sketch.seen} tokens seen, in a "
            f"layer whose cache has no window ({what})"
        )
    if kwargs.get("is_causal") is False and layer.pending > 1:
        raise UnsupportedError(
            f"is_causal=False: tokens of {what} look ahead, which slots cannot honour"
        )
    handled = {"dropout", "sliding_window", "is_causal", "softcap", "s_aux"}
    for name, value in kwargs.items():
        if value is None or name in handled or name in OF_THE_FORWARD:
            continue
        raise UnsupportedError(
            f"{what} passes {name}= to attention, which kvsketch does not know; it would be "
            "ignored once the cache is compressed. Use DynamicCache for this call"
        )
