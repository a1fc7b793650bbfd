"""Identifies the model, including its weights, and the tokenizer of a file.

Curves of a model's errors are identified by its shape alone, see ``cache.curves.model_shape``.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvsketch.errors import InputError
from kvsketch.hf.wrapped import weights_of
from kvsketch.state import name_of

# Number of elements of a parameter that its mark uses, evenly spaced.
_SAMPLED = 256
# Fields of a configuration that no key or value depends on.
_VOLATILE = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "return_dict"),
    *("output_hidden_states", "pretraining_tp", "attention_dropout", "initializer_range"),
}
_PROBE = "Line 1: the number is <42>.\n\n  Überall — 東京!"


def config_mark(config: PretrainedConfig) -> str:
    """Hash of the fields of a configuration that affect keys and values, for any version of
    transformers."""
    text = config.get_text_config(decoder=True)
    said = _without_volatile(text.to_diff_dict())
    return _hashed(json.dumps([text.model_type, said], sort_keys=True, default=str).encode())


def module_mark(module: nn.Module) -> str:
    """Name and hash of an attention module's weights: some elements of each, in bfloat16, so that
    it is the same in other dtypes."""
    own = ((name, tensor) for name, tensor in weights_of(module) if not tensor.is_meta)
    return f"{type(module).__name__}:{mark_of(own)}"


def model_mark(model: PreTrainedModel) -> str | None:
    """As ``module_mark``, of all weights on which keys and values may depend; None: some of them
    are on no device, and reading them would take long."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    return mark_of(weights_of(model.base_model))


def mark_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """The hash of a module's weights, which are given with their names in it, in order."""
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name}{tuple(weight.shape)}".encode() + _some_of(weight))
    return digest.hexdigest()[:32]


def _some_of(weight: Tensor) -> bytes:
    try:
        flat = weight.detach().flatten()
    except NotImplementedError:  # a quantised one that is made of several, such as torchao's
        parts, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
        return b"".join(_some_of(getattr(weight, part)) for part in parts)
    step = max(1, flat.numel() // _SAMPLED)
    return flat[::step][:_SAMPLED].to(torch.bfloat16).float().cpu().numpy().tobytes()


class Origin:
    """The model whose cache it is, while it is alive. A copy of the cache keeps it; a cache in
    another process has none."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> PreTrainedModel | None:
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, object]) -> Origin:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Origin, ()


def dtype_of(module: nn.Module) -> str | None:
    """Of a module's weights, as far as they are floating point."""
    found = (p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = next(found, None)
    return None if dtype is None else name_of(dtype)


def tokenizer_mark(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary, special tokens, and its encoding of a text."""
    said = [
        sorted(tokenizer.get_vocab().items()),
        sorted((name, str(value)) for name, value in tokenizer.special_tokens_map.items()),
        list(tokenizer(_PROBE)["input_ids"]),
    ]
    return _hashed(json.dumps(said).encode())


def check_model(told: Any, model: PreTrainedModel) -> None:
    """Raise InputError unless a file's ``model`` is this model.

    Args:
        told: "config", "type", and as far as they were known, "layers" (marks of attention
            modules), "weights" (that of all) and "dtype".
    """
    check_model_config(told, model.config)
    marks, dtype, weights = (told.get(name) for name in ("layers", "dtype", "weights"))
    marks = [] if marks is None else marks
    if not isinstance(marks, list) or not all(isinstance(mark, str) for mark in marks):
        raise InputError(f"model.layers={marks!r:.60} must be marks of attention modules")
    if dtype is not None and not isinstance(dtype, str):
        raise InputError(f"model.dtype={dtype!r:.60} must be the name of a dtype")
    found = _modules(model, {mark.partition(":")[0] for mark in marks})
    if dtype is not None and found and dtype not in {dtype_of(module) for module in found}:
        raise InputError(
            f"model: the file was made with weights in {dtype!s:.20}; load the model with "
            f"dtype={dtype!s:.20} (--dtype)"
        )
    whole = weights is None or model_mark(model) in (weights, None)
    if not whole or not set(marks) <= {module_mark(module) for module in found}:
        raise InputError(
            "model: the file is of a model with the same configuration and other weights (another "
            "fine-tuning, another adapter)"
        )


def check_model_config(told: Any, config: PretrainedConfig) -> None:
    """As ``check_model``, of the configuration alone: before weights are loaded."""
    if not isinstance(told, dict) or told.get("config") != config_mark(config):
        named = told.get("type") if isinstance(told, dict) else told
        raise InputError(
            f"model: the file is of another model, a {named!r:.40} whose configuration does not "
            f"fit this {config.get_text_config(decoder=True).model_type!r}"
        )


def check_tokenizer(told: Any, tokenizer: Any) -> None:
    """Raise InputError if a file's text was encoded by another tokenizer."""
    if told is not None and tokenizer is not None and told != tokenizer_mark(tokenizer):
        raise InputError("tokenizer: the file's text was encoded by another tokenizer")


def device_of(model: PreTrainedModel, layer: int) -> torch.device:
    """Where the attention of a layer is computed, also if accelerate brings its weights there."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer:
            for part in module.modules():
                told = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
                if told is not None:
                    return torch.device(told)
            for parameter in module.parameters():
                if not parameter.is_meta:
                    return torch.device(parameter.device)
    return torch.device(model.device)


def _modules(model: PreTrainedModel, names: set[str]) -> Sequence[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in names]


def _without_volatile(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {k: _without_volatile(v) for k, v in said.items() if k not in _VOLATILE}


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
