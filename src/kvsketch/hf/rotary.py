"""How queries are moved to later positions, known from their attention module alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvsketch.errors import UnsupportedError
from kvsketch.hf.turning import FIXED
from kvsketch.methods.rotation import Turn

# Families of transformers by how queries and keys of full attention depend on the position, named
# by the type of the text model's configuration. tests/hf/test_rotary.py measures it in a model of
# each. Families that are in no list have learned or other positions, latent keys, or layers whose
# rotation depends on more of the configuration.
_HALVES = """
    apertus arcee aria_text bamba bitnet cwm dbrx dots1 emu3_text_model falcon_h1 flex_olmo gemma
    gemma2 gemma3_text gemma3n_text glm4_moe gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 laguna lfm2 lfm2_moe llama mellum mimo_v2_flash minimax_m2 ministral
    ministral3 mistral mixtral modernbert-decoder nemotron olmo olmo2 olmo3 olmo_hybrid olmoe
    persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
_NEIGHBOURS = "cohere ernie4_5 ernie4_5_moe glm glm4 helium"
_UNMOVED = "afmoe cohere2 cohere2_moe jamba nemotron_h"
#: channels i and i + pairs are rotated
HALVES = frozenset(_HALVES.split())
#: channels 2i and 2i + 1 are rotated
NEIGHBOURS = frozenset(_NEIGHBOURS.split())
#: queries and keys do not depend on the position
UNMOVED = frozenset(_UNMOVED.split())


#: What moves the queries of an attention module to later positions: from ``[..., head_dim]`` and a
#: number of positions to the same shape.
Moves = Callable[[Tensor, int], Tensor]


def home_of(module: nn.Module) -> tuple[str, bool]:
    """The Python module of the class of an attention module, and whether it rotates queries and
    keys at all (SmolLM3 has layers that do not). A compiled graph can hold these."""
    return type(module).__module__, bool(getattr(module, "use_rope", True))


def turn_of(home: str, rotates: bool, config: PretrainedConfig | None) -> Moves | None:
    """What moves the queries of an attention module.

    Args:
        home, rotates: as from ``home_of``.
        config: of the text model.

    Returns:
        None if the module's family is in no list, or its frequencies depend on the length of the
        text.
    """
    kind = getattr(config, "model_type", None)
    if not home.startswith("transformers.models."):
        return None
    if kind in UNMOVED or (kind in HALVES and not rotates):
        return _unmoved
    if kind not in HALVES | NEIGHBOURS:
        return None
    return _turn(home, config, kind in NEIGHBOURS)


def check_rotary(config: PretrainedConfig, method: str) -> None:
    """Raise unless queries and keys of full attention are rotated by frequencies that do not depend
    on the length of the text.

    Raises:
        UnsupportedError: other positions, or a family that is in no list.
    """
    text = config.get_text_config(decoder=True)
    kind = getattr(text, "model_type", None)
    if kind not in HALVES | NEIGHBOURS:
        raise _no_rotary(method, f"{kind!r} models")
    if (found := _parameters(text).get("rope_type", "default")) not in FIXED:
        raise _no_rotary(method, f"{kind!r} models with rope_type={found!r}")


def rotation_of(turn: Moves | None, home: str, method: str) -> Turn:
    """How an attention module rotates queries and keys, for a method that needs it.

    Args:
        turn: from ``turn_of``; home: as from ``home_of``.

    Raises:
        UnsupportedError: it does not rotate them, or by frequencies that are not known here.
    """
    if not isinstance(turn, Turn):
        raise _no_rotary(method, home)
    return turn


def _no_rotary(method: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"method={method!r} needs the frequencies of a rotary position embedding, and {what} have "
        "none that kvsketch knows; use another method"
    )


def _unmoved(queries: Tensor, by: int) -> Tensor:
    return queries


def _turn(home: str, config: Any, neighbours: bool) -> Turn | None:
    """By the frequencies of the one rotary embedding for text that a module of transformers
    defines."""
    classes = [
        found
        for name, found in vars(sys.modules[home]).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
        if isinstance(found, type) and found.__module__ == home
    ]
    if len(classes) != 1 or _parameters(config).get("rope_type", "default") not in FIXED:
        return None
    with torch.device("cpu"):  # whatever the default device is
        rotary = classes[0](config=config)
    for name in ("inv_freq", "full_attention_inv_freq"):
        found = getattr(rotary, name, None)
        if isinstance(found, Tensor) and found.dim() == 1:
            return Turn(found, neighbours)
    return None


def _parameters(config: Any) -> Any:
    """Those of the rotary embedding of full attention."""
    found: Any = getattr(config, "rope_parameters", None) or {}
    return found.get("full_attention", found)
