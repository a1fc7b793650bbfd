"""Checks of new tokens and queries, before a layer changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.cache import HeadBudgets
from kvsketch.errors import InputError
from kvsketch.methods.base import all_finite

#: of the tokens that a layer holds: ``[batch, num_key_value_heads, 1, head_dim]``, dtype and device
Held = tuple[tuple[int, ...], torch.dtype | None, torch.device | None]


def check_tokens(
    keys: Tensor, values: Tensor, budget: HeadBudgets | None, held: Held | None
) -> None:
    """Raise InputError unless new keys and values ``[batch, num_key_value_heads, q, head_dim]`` fit
    the tokens that a layer holds (None: it holds none), and its budgets; a chunk of a prompt must
    be finite."""
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise InputError(
            "keys and values must be [batch, num_key_value_heads, q, head_dim], got "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if budget is not None and budget.even is None and budget.heads != keys.shape[1]:
        raise InputError(
            f"the budgets are of {budget.heads} KV heads, and these keys have {keys.shape[1]}: "
            "another model (make one cache per model, or call reset()), or tensor parallelism "
            "(give one share per layer)"
        )
    if held is not None:
        shape, dtype, device = held
        if keys.shape[:2] != shape[:2] or keys.shape[3] != shape[3]:
            raise InputError(
                f"keys {tuple(keys.shape)} do not fit the cache, which holds {shape} per "
                "token: batch, heads and head_dim must be equal"
            )
        if keys.dtype != dtype or keys.device != device:
            raise InputError(
                f"keys are {keys.dtype} on {keys.device}, the cache holds {dtype} on {device}"
            )
    if keys.shape[2] > 1:  # decoded tokens are checked when they are compressed
        for name, tensor in (("keys", keys), ("values", values)):
            if not all_finite(tensor):
                raise InputError(f"{name} are not finite (NaN or infinity); cache unchanged")


#: fields of a configuration that every model of it has in common
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")


def check_config(config: Any, module: nn.Module) -> None:
    """Raise InputError if an attention module is of a model of another shape than the configuration
    that a cache was made from, as far as the module shows its own."""
    ours, theirs = config.get_text_config(decoder=True), getattr(module, "config", None)
    if theirs is None or theirs is ours:
        return
    for name in _SHAPE:
        told, found = getattr(ours, name, None), getattr(theirs, name, None)
        if None not in (told, found) and told != found:
            raise InputError(
                f"this SketchCache was made from the configuration of another model, with "
                f"{name}={told}; this model has {found}: make the cache with "
                "SketchCache(model.config)"
            )


def check_positions(seen: int, positions: Any) -> None:
    """Raise InputError if ``generate`` was given a text of n tokens that is no longer than the s
    tokens that the cache has seen. transformers then passes on the tokens from s - n on, as if they
    were new: all of the text if n = s. Their positions show it; those of new tokens start at s, and
    those of models that number every chunk from 0 (Bamba) end elsewhere.

    Args:
        seen: s, without the tokens of these positions.
        positions: of several tokens, ``[batch, q]``, or anything else, which shows nothing.
    """
    if not seen or not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    if bool((positions[:, 0] + positions[:, -1] + 1 == seen).all()):
        own = f"; position_ids of your own must number new tokens from {seen} on"
        raise InputError(BEHIND.format(seen=seen) + own)


#: of a text that is no longer than the cache: ``generate`` passes on only what is beyond
BEHIND = (
    "the text is not longer than the {seen} tokens that this cache has seen: to continue, pass the "
    "ids of all that was read and generated, followed by new ones; for another text make a new "
    "SketchCache, or call reset()"
)


def check_queries(queries: Tensor, batch: int, heads: int, dim: int) -> None:
    """Raise InputError unless ``[batch, num_attention_heads, q, head_dim]`` fits keys of so many
    rows, KV heads and channels."""
    if queries.shape[0] != batch or queries.shape[3] != dim or queries.shape[1] % heads:
        raise InputError(
            f"queries {tuple(queries.shape)} do not fit keys of {batch} rows, {heads} KV heads "
            f"and head_dim={dim}: batch and head_dim must be equal, and the number of "
            "attention heads a multiple of the KV heads"
        )
