"""Rotates keys to later positions, for rotary position embeddings.

A rotary key is R(p) k, where R(p) turns pairs of channels by angles p * inv_freq (Su et al.,
RoFormer, 2104.09864). R(p + n) = R(n) R(p), so a key of position p becomes the one of position
p + n by R(n), whatever p is; and so does a sum of keys of different positions. This holds if the
frequencies and everything else do not depend on the position, which is tested on the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvsketch.errors import UnsupportedError
from kvsketch.hf.passing import passed
from kvsketch.methods.rotation import Turn

#: rope types whose frequencies do not depend on the position
FIXED = ("default", "linear", "llama3", "yarn")
# Rounding error that is allowed, as a fraction of a key's norm.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def turn_of(model: PreTrainedModel, by: int) -> Turn:
    """How the keys of a model are rotated by ``by`` positions: by its own rotary embedding,
    verified with a token read at both positions (alone, it attends only to itself at any position,
    so the keys of all layers must agree).

    Raises:
        UnsupportedError: positions other than plain rotary ones: learned, ALiBi, dynamic scaling,
            frequencies that differ by layer.
    """
    text = model.config.get_text_config(decoder=True)
    refused = f"{text.model_type!r} models have no plain rotary positions"
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else None
    if kind not in FIXED:
        raise UnsupportedError(f"{refused}: rope_type={kind!r}")
    found = [f for m in model.modules() if (f := _frequencies(m)) is not None]
    if len(found) != 1:
        raise UnsupportedError(f"{refused}: {len(found)} rotary embeddings instead of one")
    here, there = (_keys_at(model, position) for position in (0, by))
    for neighbours in (False, True):
        turn = Turn(found[0], neighbours)
        if all(_agree(turn(a, by), b) for a, b in zip(here, there, strict=True)):
            return turn
    raise UnsupportedError(
        f"{refused}: a token's keys at positions 0 and {by} do not differ by one"
    )


def _frequencies(module: nn.Module) -> Tensor | None:
    found = getattr(module, "inv_freq", None)
    return found if isinstance(found, Tensor) and found.dim() == 1 else None


def _keys_at(model: PreTrainedModel, position: int) -> list[Tensor]:
    """One token's keys in every layer."""
    cache = DynamicCache(config=model.config)
    ids = torch.full((1, 1), 3, device=model.device)
    at = torch.full((1, 1), position, device=model.device)
    model(ids, position_ids=at, **passed(model, cache), use_cache=True)
    return [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]


def _agree(turned: Tensor, key: Tensor) -> bool:
    if turned.shape != key.shape:
        return False
    off = (turned.float() - key.float()).norm() / key.float().norm().clamp(min=1e-30)
    return bool(off < _ROUNDING.get(key.dtype, 1e-4))
