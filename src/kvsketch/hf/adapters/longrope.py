"""Phi-3, Phi-3.5-MoE and Phi-4 multimodal: rotary frequencies that change with the length.

Beyond ``original_max_position_embeddings`` tokens they rotate by other frequencies, and
``generate`` drops the cache and reads everything again when it crosses that length. A SketchCache
it dropped would stay behind without a word, and what it holds cannot be rotated anew.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from kvsketch.errors import UnsupportedError
from kvsketch.hf.adapters.base import Adapter
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.passing import given

_CLASSES = (
    ("phi3", "Phi3ForCausalLM"),
    ("phimoe", "PhimoeForCausalLM"),
    ("phi4_multimodal", "Phi4MultimodalForCausalLM"),
)


def install() -> None:
    """Let ``generate`` of these models say that it would drop a SketchCache."""
    for package, name in _CLASSES:
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        _wrap(getattr(module, name))


ADAPTER = Adapter(install)


def _is_ours(cache: Any) -> bool:
    """Whether it is a ``SketchCache``, by its layers."""
    return any(isinstance(layer, SketchLayer) for layer in getattr(cache, "layers", ()))


def _wrap(model_class: Any) -> None:
    original = model_class.prepare_inputs_for_generation
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = args[0] if args else given(kwargs)
        limit = getattr(self.config, "original_max_position_embeddings", None)
        if limit is not None and _is_ours(cache):
            seen = cache.get_seq_length()
            if 0 < seen <= limit < input_ids.shape[1]:
                raise UnsupportedError(
                    f"{type(self).__name__} changes its rotary frequencies after {limit} tokens "
                    f"(original_max_position_embeddings), and this SketchCache holds {seen} tokens "
                    "of the frequencies before: read a prompt that is longer than that at once, "
                    f"stay within {limit} tokens, or use DynamicCache"
                )
        return original(self, input_ids, *args, **kwargs)

    prepare._kvsketch = True  # type: ignore[attr-defined]
    model_class.prepare_inputs_for_generation = prepare
