"""Small models of every family we support, built from their real transformers classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvsketch.methods.registry import ALL_METHODS, REREADING, ROTATING
from kvsketch.methods.sketches import Sketch

VOCABULARY = 101
#: methods that ``generate`` alone can run with any model; one_dimensional needs head_dim 1
EVERY_METHOD = [x for x in ALL_METHODS if x not in ("one_dimensional", *REREADING)]
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}


def _gemma(cls: type[PretrainedConfig]) -> PretrainedConfig:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    return cls(**{**_GQA, "num_hidden_layers": 3}, layer_types=kinds, sliding_window=8)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in _GQA.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**_GQA),
    "gemma2": lambda: _gemma(Gemma2Config),
    "gemma3": lambda: _gemma(Gemma3TextConfig),
    "phi3": lambda: Phi3Config(**{k: v for k, v in _GQA.items() if k != "head_dim"}),
    "opt": lambda: OPTConfig(**_COMMON, ffn_dim=96, word_embed_proj_dim=64),
    "mpt": lambda: MptConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def build(family: str, attention: str | None = None) -> Any:
    """A float32 model with random weights, large enough that greedy ids vary."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = None  # a full-length answer, always
    model.generation_config.use_cache = True  # it is off in MPT
    return model.float().eval()


def runs(family: str, method: str) -> bool:
    """Whether a family has what a method requires: rotary positions, if it needs them."""
    return method not in ROTATING or family not in ("opt", "mpt")


def capability(method: str) -> tuple[object, ...]:
    """What a cache must do for a method: methods that are alike in this take the same way."""
    cls = ALL_METHODS[method]
    asked = cls.requires
    names = ("ragged", "allocation", "bits")
    return (
        issubclass(cls, Sketch), asked.queries, asked.output, asked.rotary,
        asked.whole_prompt,
        *(getattr(cls, name, None) for name in names),
    )  # fmt: skip


def crossed(families: Iterable[str], methods: Iterable[str]) -> list[Any]:
    """Parameters (family, method), of those that run together. By default every method runs with
    one family, and every family with one method of each capability; all other pairs are slow
    tests."""
    families, methods = list(families), list(methods)
    alike: dict[tuple[object, ...], list[str]] = {}
    for method in methods:
        alike.setdefault(capability(method), []).append(method)
    chosen = set()
    for i, method in enumerate(methods):
        able = [family for family in families if runs(family, method)]
        chosen.add((able[i % len(able)], method))
    for i, family in enumerate(families):
        chosen |= {(family, some[i % len(some)]) for some in alike.values()}
    return [
        pytest.param(*pair, marks=[] if pair in chosen else pytest.mark.slow)
        for pair in itertools.product(families, methods)
        if runs(*pair)
    ]
