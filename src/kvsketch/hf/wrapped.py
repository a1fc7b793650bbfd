"""Models inside what torch.compile and PEFT make of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.errors import InputError


def transformers_model(model: Any) -> PreTrainedModel:
    """The model of transformers that a compiled one, or one with adapters, consists of.

    Raises:
        InputError: there is none.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise InputError(f"model must be a transformers model, got {type(model).__name__}")
    return inner


def learns_prompts(model: Any) -> bool:
    """Whether PEFT puts learned tokens before a text (prompt and prefix tuning)."""
    told = getattr(getattr(model, "_orig_mod", model), "active_peft_config", None)
    return bool(getattr(told, "is_prompt_learning", False))


def replaces_caches(model: PreTrainedModel) -> bool:
    """Whether the ``generate`` that runs is that of PEFT, which gives its model a cache of its own
    with a learned prefix."""
    peft = getattr(model.prepare_inputs_for_generation, "__self__", model)
    told = getattr(peft, "active_peft_config", None)
    return getattr(told, "peft_type", None) in ("PREFIX_TUNING", "CARTRIDGE")


def weights_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights that a module computes with, sorted by name: its parameters and the buffers that
    are stored with it. A module that accelerate has moved away lends those that it keeps, and one
    with PEFT's adapters those of its active ones."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        kept = getattr(getattr(part, "_hf_hook", None), "weights_map", None)
        stored = set(part._buffers) - part._non_persistent_buffers_set
        buffers = {name: part._buffers[name] for name in stored}
        for name, tensor in {**part._parameters, **buffers}.items():
            if tensor is None:
                continue
            if tensor.is_meta and kept is not None and name in kept:
                tensor = kept[name]
            found[f"{prefix}.{name}" if prefix else name] = tensor
    for name in _unused_adapters(module):
        found = {n: t for n, t in found.items() if n != name and not n.startswith(f"{name}.")}
    named = {name.replace("base_layer.", ""): tensor for name, tensor in found.items()}
    return [(name, named[name]) for name in sorted(named)]


def _unused_adapters(module: nn.Module) -> list[str]:
    """The names of the adapters in a module that are not active."""
    found: list[str] = []
    for name, layer in module.named_modules():
        if not hasattr(layer, "base_layer") or not hasattr(layer, "active_adapters"):
            continue
        used = () if getattr(layer, "disable_adapters", False) else layer.active_adapters
        at = f"{name}." if name else ""
        for kind, adapters in layer.named_children():
            if kind != "base_layer" and isinstance(adapters, nn.ModuleDict | nn.ParameterDict):
                found += [f"{at}{kind}.{one}" for one in adapters if one not in used]
    return found
