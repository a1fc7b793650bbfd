"""Queries are moved to later positions as the models of each family would have them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import tiny_models
from families import CONFIGS, build
from kvsketch import SketchCache
from kvsketch.hf import interface
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.rotary import HALVES, NEIGHBOURS, UNMOVED, home_of, turn_of

BY = 37
#: the type of a model whose text part has another type
WHOLE = {"emu3_text_model": "emu3"}
FAMILIES = sorted(HALVES | NEIGHBOURS | UNMOVED)


def turn_at(module: Any) -> Any:
    return turn_of(*home_of(module), getattr(module, "config", None))


def at_positions(model: Any, *positions: int) -> list[dict[int, tuple[Any, Tensor, Tensor]]]:
    """Module, queries and keys of one token, alone at each position, by layer."""
    found = []

    def look(kernel: Callable[..., Any], module: Any, query: Tensor, key: Tensor, *rest: Any,
             **more: Any) -> Any:  # fmt: skip
        found[-1][module.layer_idx] = module, query, key
        return kernel(module, query, key, *rest, **more)

    with torch.no_grad(), interface.watched(model, look):
        for position in positions:
            found.append({})
            cache = DynamicCache(config=model.config)
            place = torch.full((1, 1), position)
            model(torch.full((1, 1), 3), position_ids=place, past_key_values=cache, use_cache=True)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_are_moved_as_the_model_has_them(family: str) -> None:
    kind = WHOLE.get(family, family)
    if kind not in tiny_models.MODEL_TYPES:
        pytest.skip(f"this transformers has no {kind}")
    try:
        model = tiny_models.build(kind)
        cache = SketchCache(model.config)
    except Exception as error:
        pytest.skip(f"no tiny {kind} in this transformers: {type(error).__name__}")
    here, there = at_positions(model, 3, 3 + BY)
    layers = [n for n, layer in enumerate(cache.layers) if isinstance(layer, SketchLayer)]
    assert layers
    moved = 0.0
    for number in layers:
        module = here[number][0]
        turn = turn_at(module)
        assert turn is not None
        for before, after in zip(here[number][1:], there[number][1:], strict=True):
            torch.testing.assert_close(turn(before, BY), after, rtol=1e-4, atol=1e-4)
            moved = max(moved, float((before - after).abs().max()))
    assert (moved > 1e-3) == (family not in UNMOVED)


def test_a_moved_query_is_that_of_the_same_token_read_again() -> None:
    """In the first layer, where a query depends on nothing but its token and its position."""
    model, queries = build("llama"), []

    def look(
        kernel: Callable[..., Any], module: Any, query: Tensor, *rest: Any, **more: Any
    ) -> Any:
        queries.append((module, query))
        return kernel(module, query, *rest, **more)

    ids = torch.randint(3, 90, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), interface.watched(model, look):
        model(torch.cat([ids, ids], dim=1))
    module, first = queries[0]
    turn = turn_at(module)
    assert turn is not None
    torch.testing.assert_close(turn(first[:, :, :50], 50), first[:, :, 50:], rtol=1e-4, atol=1e-4)


def test_what_is_not_known_is_not_moved() -> None:
    for family in ("opt", "gpt2"):
        model = build(family) if family in CONFIGS else tiny_models.build(family)
        (here,) = at_positions(model, 3)
        assert all(turn_at(module) is None for module, *_ in here.values())
    config = LlamaConfig(
        **{
            **CONFIGS["llama"]().to_dict(),
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        }
    )
    module = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    assert turn_at(module) is None
    module = build("gemma3").model.layers[1].self_attn
    assert turn_at(module) is not None
    module.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert turn_at(module) is None
    module = build("llama").model.layers[0].self_attn
    assert turn_at(module) is not None
    elsewhere = type("LlamaAttention", (type(module),), {"__module__": "somewhere.else"})
    module.__class__ = elsewhere  # code of another origin may rotate otherwise
    assert turn_at(module) is None
