"""The attention of a layer whose cache is a SketchCache.

It runs the model's own kernel while the layer is uncompressed, and attends to slots afterwards.
Every argument that a model passes is used, known to be irrelevant for
slots, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.attention import attend_to
from kvsketch.errors import UnsupportedError
from kvsketch.hf import second_reading
from kvsketch.hf.checks import check_positions
from kvsketch.hf.interface import Kernel
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.masks import PLAIN, Masks, View, mask_over
from kvsketch.hf.second_reading import Again
from kvsketch.observed import Observed

# Arguments that do not affect how a query attends to a key; transformers passes them through.
OF_THE_FORWARD = frozenset(
    {
        "cache_position",
        "head_mask",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",  # has its own check
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",  # keys and queries are rotated already
        "return_dict",
        "token_type_ids",
        "tokenizer",  # of ``generate(stop_strings=...)``, which passes it on
        "use_cache",
    }
)


@dataclass(frozen=True)
class LayerTurn:
    """What the attention of a layer depends on besides the layer.

    Attributes:
        masks: of the stream.
        first, last: whether the forward begins, or ends, with this layer.
        reading: whether ``prefill`` reads a context.
        again: the part of it that is read a second time now; None: none is.
        compresses: whether the layer is compressed, or will be after this.
        soon: whether it can be compressed while other layers have not read the same tokens.
        settle: ends a piece of its prompt, whose queries it is called with.
    """

    masks: Masks
    first: bool
    last: Callable[[], bool]
    reading: bool
    again: Again | None
    compresses: Callable[[], bool]
    soon: bool
    settle: Callable[[Observed], None]


def attention(
    layer: SketchLayer,
    turn: LayerTurn,
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
) -> tuple[Tensor, Tensor | None, Observed | None]:
    """What a model's attention module gets instead of the result of ``kernel``.

    Args:
        layer: the layer of the keys and values ``key`` and ``value``.
        kernel: the function that the model requested by ``name``.
        module: the attention module; None in a compiled graph that is run before any other forward.
        query: ``[batch, num_attention_heads, q, head_dim]``.
        attention_mask: see ``masks.Masks.read``.
        s_aux: ``[num_attention_heads]``, logits of attention sinks.

    Returns:
        ``[batch, q, num_attention_heads, value_dim]``, the kernel's weights if it ran, and the
        queries, unless tokens are never compressed.

    Raises:
        UnsupportedError: an argument or a mask that compressed attention cannot apply.
        InputError: a cache of another model.
    """
    layer.check_returned(module, key, value)
    stream, (batch, _, q, dim) = layer.stream, query.shape
    # Not for every decoded token, nor where padding moves positions.
    if q > 1 and turn.first and not turn.reading and turn.masks.live is None:
        check_positions(stream.seen - q, kwargs.get("position_ids"))
    for given, number in (("softcap", softcap), ("s_aux", s_aux)):
        if number is not None:
            kwargs[given] = number

    def usual(mask: Any) -> tuple[Tensor, Tensor | None]:
        return kernel(module, query, key, value, mask, *args, scaling=scaling, **kwargs)

    again = turn.again
    if layer.lossless:  # nothing to check: the kernel gets all arguments
        return *usual(attention_mask), None
    if module is not None:  # a graph has checked the arguments that it passes on
        check_arguments(layer, turn, module, args, kwargs)
    queries = layer.to_slots(module, query)
    layer.check_queries(queries)
    if again is not None and again.unmasked:
        attention_mask = second_reading.widened(attention_mask, stream.seen)
    view = turn.masks.read(attention_mask, batch, q, stream.seen)
    if view is not PLAIN or stream.padded:
        layer.mark(view)
    scale = dim**-0.5 if scaling is None else scaling
    seen = queries.detach() if queries.requires_grad else queries
    observed = Observed(seen, scale, softcap, live=view.causal, sinks=s_aux)
    sizes = [q] if turn.reading or q == 1 else layer.cuts(view, turn.soon)
    if len(sizes) > 1:
        out, observed = attend_in_pieces(layer, observed, view, sizes, turn.settle)
        return layer.from_slots(module, out).transpose(1, 2).contiguous(), None, observed
    if stream.compressed:
        asked = observed if seen is queries else replace(observed, queries=queries)
        out = layer.from_slots(module, attend_slots(layer, asked, view))
        return out.transpose(1, 2).contiguous(), None, observed
    if again is None:
        return *usual(attention_mask), observed
    plain, back = view.plain and view.causal is None, partial(layer.from_slots, module)
    return second_reading.attention(
        layer, again, name, observed, plain, attention_mask, usual, back, turn.last()
    )


def attend_in_pieces(
    layer: SketchLayer,
    asked: Observed,
    view: View,
    sizes: Sequence[int],
    settle: Callable[[Observed], None],
) -> tuple[Tensor, Observed]:
    """Attention of the newest tokens, which are compressed in pieces.

    Args:
        asked: their queries ``[batch, num_attention_heads, q, head_dim]``.
        view: the model's mask, of padding alone.
        sizes: of the pieces.
        settle: ends a piece.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``, and the queries of the last piece, which is
        not settled yet.
    """
    stream, count, at, outs = layer.stream, layer.pending, 0, []
    new = stream.parted.newest(count)
    stream.drop(count)
    for size in sizes:
        layer.pending = size
        stream.extend(new.narrow(at, size))
        if view.newest is not None:
            stream.mark_padding(view.newest[:, at : at + size])
        piece = asked.narrow(at, size)
        outs.append(attend_to(piece, stream.open(), None, stream.padded))
        at += size
        if at < count:
            layer.pending = 0
            settle(piece)
    layer.pending = count
    return torch.cat(outs, dim=2), piece


def attend_slots(layer: SketchLayer, asked: Observed, view: View) -> Tensor:
    """Attention of the newest tokens over the slots of a compressed layer, including themselves.

    Args:
        asked: their queries ``[batch, num_attention_heads, q, head_dim]``.
        view: the model's mask.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``.

    Raises:
        UnsupportedError: a mask that cannot be applied to slots.
    """
    stream = layer.stream
    if view is PLAIN or view.plain:
        return attend_to(asked, stream.open(), None, stream.padded)
    slots = stream.slots
    return attend_to(asked, slots, mask_over(view, slots, *asked.queries.shape[1:3]))


def check_arguments(
    layer: SketchLayer,
    turn: LayerTurn,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Raise unless compressed attention can apply every argument.

    Raises:
        UnsupportedError: an argument that it does not know, or one that it cannot apply.
    """
    what = type(module).__name__
    if args:
        raise UnsupportedError(f"{what} passes {len(args)} arguments to attention without a name")
    if kwargs.get("output_attentions") and turn.compresses():
        raise UnsupportedError(
            "output_attentions=True needs a weight per token, and this cache is compressed: a "
            "slot may not be a token. Use DynamicCache, or a budget >= the number of tokens"
        )
    training = module.training and torch.is_grad_enabled()
    if training or (module.training and kwargs.get("dropout")):
        raise UnsupportedError(
            "the model is in training mode; gradients do not flow through compressed slots and "
            "dropout does not reach them: call model.eval()"
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < layer.stream.seen:
        raise UnsupportedError(
            f"sliding_window={window} is shorter than the {layer.stream.seen} tokens seen, in a "
            f"layer whose cache has no window ({what})"
        )
    if kwargs.get("is_causal") is False and layer.pending > 1:
        raise UnsupportedError(
            f"is_causal=False: tokens of {what} look ahead, which is not possible with slots"
        )
    handled = {"dropout", "sliding_window", "is_causal", "softcap", "s_aux"}
    for name, value in kwargs.items():
        if value is None or name in handled or name in OF_THE_FORWARD:
            continue
        raise UnsupportedError(
            f"{what} passes {name}= to attention, which kvsketch does not know; it would be "
            "ignored once the cache is compressed. Use DynamicCache for this call"
        )
