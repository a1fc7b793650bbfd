"""What ``generate`` must not do with a cache of ours, and what it says of it: the model, and the
text."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.identity import Origin
from kvsketch.hf.passing import given
from kvsketch.hf.wrapped import replaces_caches


def install(kind: type[Any]) -> None:
    """Have ``generate`` refuse ``use_cache=False`` beside a cache of this kind, once per process:
    it would pass all of the text at every step, also to a cache that has seen it, and the answers
    would be wrong without a word. Fine-tuned models often have it in their settings. Tell the cache
    which text it reads, so that a later ``generate`` with another one is refused, too."""
    original: Any = GenerationMixin._prepare_cache_for_generation
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def prepared(
        self: Any, config: Any, arguments: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = given(arguments)
        if config.use_cache is False and isinstance(cache, kind):
            raise InputError(
                f"use_cache=False with a {kind.__name__}: generate would pass all of the text "
                "again at every step. Pass use_cache=True (the model's generation_config may have "
                "it off, as after a training)"
            )
        if isinstance(cache, kind):
            if self.training and _drops_caches(self):
                raise UnsupportedError(
                    f"a {kind.__name__} in training mode with gradient checkpointing, where the "
                    "model drops every cache: call model.eval()"
                )
            if replaces_caches(self):
                raise UnsupportedError(
                    f"a {kind.__name__} with PEFT's prefix tuning, which replaces the given cache "
                    "by one that holds its prefix: use LoRA or prompt tuning"
                )
            cache.origin = Origin(self)
            cache.history.begin()
        return original(self, config, arguments, *args, **kwargs)

    prepared._kvsketch = True  # type: ignore[attr-defined]
    GenerationMixin._prepare_cache_for_generation = prepared
    assisted: Any = GenerationMixin._assisted_decoding
    inputs: Any = GenerationMixin.prepare_inputs_for_generation

    @functools.wraps(assisted)
    def assisting(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = given(kwargs)
        if isinstance(cache, kind):
            cache.history.assist(input_ids, cache.get_seq_length())
        return assisted(self, input_ids, *args, **kwargs)

    @functools.wraps(inputs)
    def passing(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = given(kwargs)
        if isinstance(cache, kind) and input_ids is not None:
            new = args[0] if args else kwargs.get("next_sequence_length")
            new = cache.history.passed(input_ids, new, cache.get_seq_length())
            args, kwargs = args[1:], {**kwargs, "next_sequence_length": new}
        return inputs(self, input_ids, *args, **kwargs)

    GenerationMixin._assisted_decoding = assisting
    GenerationMixin.prepare_inputs_for_generation = passing


def _drops_caches(model: Any) -> bool:
    """Whether its layers are computed again for gradients, by the older name where there is no
    other."""
    now = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if now is None else now)
