"""Real queries, keys and values of a model, captured at its attention function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.cache.queries import side_by_side
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.adapters import mpt
from kvsketch.hf.interface import Kernel, watched
from kvsketch.hf.models import has_interface, has_latents, layers_of
from kvsketch.observed import Observed
from kvsketch.slots import Slots


@dataclass(frozen=True)
class Activations:
    """Queries, keys and values of one attention layer on one prompt, after rotary embedding.

    Attributes:
        layer: its index.
        queries: ``[batch, num_attention_heads, n, head_dim]``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``; values likewise with value_dim.
        scaling: multiplies <q, k>.
        softcap: of the scores (Gemma 2), or None.
        sinks: logits of attention sinks, ``[num_attention_heads]``, or None.
        slopes: of ALiBi (MPT), ``[num_attention_heads]``, or None: added to the scores, times the
            position.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def observed(self) -> Observed:
        """The queries, with the settings that turn them into scores."""
        return Observed(
            self.queries, self.scaling, self.softcap, slopes=self.slopes, sinks=self.sinks
        )

    @property
    def slots(self) -> Slots:
        """The tokens as slots, with their positions if scores depend on them."""
        if self.slopes is None:
            return Slots(self.keys, self.values)
        place = torch.arange(self.keys.shape[2], device=self.keys.device, dtype=torch.float32)
        return Slots(self.keys, self.values, positions=place.expand(self.keys.shape[:3]))


def capture(
    model: Any, input_ids: Tensor, layers: Sequence[int] | None = None
) -> list[Activations]:
    """Run a prompt once and return the activations of its attention layers, in float32.

    Args:
        model: a transformers causal language model.
        input_ids: ``[batch, n]``, no padding.
        layers: which layers; None: all.

    Raises:
        InputError: a layer the model does not have.
        UnsupportedError: its attention is not transformers' attention interface.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for layer in layers or ():
        if not 0 <= layer < count:
            raise InputError(f"layers: {layer} must be in 0 .. {count - 1}")
    caught: list[Activations] = []
    if not can_be_caught(type(model), model.config):
        raise _unsupported(model)
    catching = _reading if model.config.model_type == _MPT else _catching
    # Without the head: of logits_to_keep=1, some layers (Gemma 4) compute the last token alone.
    with catching(model, caught, layers), torch.no_grad():
        model.base_model(input_ids.to(model.device), use_cache=False)
    if not caught:
        raise _unsupported(model)
    return caught


def capture_compressed(model: Any, input_ids: Tensor) -> list[tuple[Slots, Observed]]:
    """The tokens of every layer that a ``SketchCache`` compresses, in order, and the queries of all
    layers that read them.

    Args:
        model, input_ids: as for ``capture``.

    Raises:
        UnsupportedError: as ``capture``, or the model caches latents instead of keys and values.
    """
    if has_latents(model.config):
        raise UnsupportedError(
            f"{type(model).__name__} caches latents, whose errors are measured on a prompt of its "
            "own only (allocation='measured'), not on files"
        )
    caught, chosen = capture(model, input_ids), layers_of(model.config)[1]
    # Others are windows, and layers that read the keys of others. Zamba's have no numbers.
    more = len(caught) > len(chosen)
    named = [one for one in caught if not more or one.layer in chosen]
    if len(named) != len(chosen):
        raise UnsupportedError(
            f"{type(model).__name__} has {len(chosen)} layers to compress, and its attention names "
            f"{len(named)} of them"
        )
    found = []
    for one in named:
        rest = [other for other in caught if other is not one and _same_keys(one, other)]
        observed = side_by_side([each.observed for each in (one, *rest)], one.keys.shape[1])
        assert observed is not None
        found.append((one.slots, observed))
    return found


def _same_keys(one: Activations, other: Activations) -> bool:
    return one.keys.shape == other.keys.shape and torch.equal(one.keys, other.keys)


_MPT = "mpt"


def can_be_caught(cls: type, config: Any) -> bool:
    """Whether ``capture`` can read the attention inputs of this class; needs no weights."""
    return config.model_type == _MPT or has_interface(cls)


def _unsupported(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not use transformers' attention interface, so its "
        "activations cannot be caught"
    )


def _catching(
    model: Any, caught: list[Activations], layers: Sequence[int] | None
) -> AbstractContextManager[None]:
    def attention(
        kernel: Kernel,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer < 0:  # Zamba, whose layers share modules
            layer = len(caught)
        if layers is None or layer in layers:
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            q, k, v = (t.detach().float().clone() for t in (query, key, value))
            seen = Activations(
                layer, q, k, v, float(scaling), kwargs.get("softcap"), kwargs.get("s_aux")
            )
            caught.append(seen)
        return kernel(module, query, key, value, *args, **kwargs)

    return watched(model, attention)


def _reading(
    model: Any, caught: list[Activations], layers: Sequence[int] | None
) -> AbstractContextManager[None]:
    """MPT's attention uses no interface: its queries, keys and values are projected once more,
    before it runs."""

    def seen(module: Any, asked: Observed, keys: Tensor, values: Tensor) -> None:
        layer = int(module.layer_idx)
        if layers is None or layer in layers:
            q, k, v = (t.detach().float().clone() for t in (asked.queries, keys, values))
            slopes = None if asked.slopes is None else asked.slopes.detach().float()
            caught.append(Activations(layer, q, k, v, float(asked.scaling), slopes=slopes))

    return mpt.watched(model, seen)


def intercepted(
    model: Any, visit: Callable[[nn.Module, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Every attention layer's output goes through ``visit(module, out)``, out
    ``[batch, tokens, heads, value_dim]``; the model continues with its return value. Works with any
    cache.

    Raises:
        UnsupportedError: the model's attention is not transformers' attention interface.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise _unsupported(model)

    def attention(kernel: Kernel, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out, weights = kernel(module, *args, **kwargs)
        return visit(module, out), weights

    return watched(model, attention)
