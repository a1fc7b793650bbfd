"""Real queries, keys and values of a model, caught at its attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.attention import usual_kernel
from kvsketch.slots import Observed

_NAME = "kvsketch_capture"


@dataclass(frozen=True)
class Activations:
    """What one attention layer saw of one prompt, after rotary embedding.

    Attributes:
        layer: its index.
        queries: ``[batch, num_attention_heads, n, head_dim]``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``; values likewise with value_dim.
        scaling: multiplies <q, k>.
        softcap: of the scores (Gemma 2), or None.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softcap: float | None = None

    @property
    def observed(self) -> Observed:
        """The queries with all that turns them into scores."""
        return Observed(self.queries, self.scaling, self.softcap)


def capture(
    model: Any, input_ids: Tensor, layers: Sequence[int] | None = None
) -> list[Activations]:
    """Run a prompt once and return what its attention layers saw, in float32.

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
    if not getattr(model, "_supports_attention_backend", False):
        raise _unsupported(model)
    with _catching(model, caught, layers), torch.no_grad():
        model(input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    if not caught:
        raise _unsupported(model)
    return caught


def _unsupported(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not use transformers' attention interface, so its "
        "activations cannot be caught"
    )


@contextmanager
def _catching(
    model: Any, caught: list[Activations], layers: Sequence[int] | None
) -> Iterator[None]:
    config = model.config.get_text_config(decoder=True)
    # sdpa knows no soft-capping
    kernel = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        layer = int(getattr(module, "layer_idx", len(caught)))
        if layers is None or layer in layers:
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            q, k, v = (t.detach().float().clone() for t in (query, key, value))
            caught.append(Activations(layer, q, k, v, float(scaling), kwargs.get("softcap")))
        return usual_kernel(module, kernel)(module, query, key, value, *args, **kwargs)

    with _replaced(config, kernel, attention):
        yield


@contextmanager
def intercepted(model: Any, visit: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
    """Every attention layer's output goes through ``visit(module, out)``, out
    ``[batch, tokens, heads, value_dim]``; the model goes on with what it returns. Works around any
    cache; one that replaces the attention function has to be made before.

    Raises:
        UnsupportedError: the model's attention is not transformers' attention interface.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise _unsupported(model)
    config = model.config.get_text_config(decoder=True)
    kernel = config._attn_implementation or "eager"

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out, weights = usual_kernel(module, kernel)(module, *args, **kwargs)
        return visit(module, out), weights

    with _replaced(config, kernel, attention):
        yield


@contextmanager
def _replaced(config: Any, kernel: str, attention: Callable[..., Any]) -> Iterator[None]:
    """``attention`` instead of the model's own, with the masks of ``kernel``."""
    before = config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
