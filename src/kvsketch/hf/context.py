"""``with compressing(model, ...):`` compression without passing a cache, inside a block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.cache import SketchCache
from kvsketch.hf.identity import Origin
from kvsketch.hf.passing import given, passed, passed_to_generate
from kvsketch.hf.wrapped import transformers_model


@contextmanager
def compressing(model: PreTrainedModel, *args: Any, **settings: Any) -> Iterator[list[SketchCache]]:
    """Give every ``generate`` and every forward of ``model`` without a cache a new ``SketchCache``;
    after the block the model is unchanged.

    This works through ``pipeline`` and any library that calls ``model.generate``. A call that
    passes a cache, or ``use_cache=False``, is not changed. The model itself is, and so
    are the calls of other threads. Continuous batching (``generate_batch``), which makes a cache of
    its own, is refused inside the block.

    Args:
        model: a transformers causal language model, also compiled or with PEFT's adapters.
        args: the method; ``settings``: further arguments of ``SketchCache``.

    Yields:
        The caches made so far, newest last; the last one's ``summary()`` and ``error()`` are those
        of the last call.

    Raises:
        InputError: not a model, or invalid settings; nothing is changed.
        UnsupportedError: a model whose cache cannot be compressed; nothing is changed.

    Example:
        >>> with kvsketch.compressing(model, budget=0.25) as caches:      # doctest: +SKIP
        ...     pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")
        >>> caches[-1].summary()["slots"]                                  # doctest: +SKIP
    """
    model = transformers_model(model)
    if not model.can_generate():
        raise InputError(f"model must be one that generates, got {type(model).__name__}")
    SketchCache(model.config, *args, **settings)  # invalid settings should fail now
    caches: list[SketchCache] = []

    def new_cache() -> SketchCache:
        caches.append(SketchCache(model.config, *args, **settings))
        caches[-1].origin = Origin(model)
        return caches[-1]

    generate = model.generate

    @functools.wraps(generate)
    def generating(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("use_cache", getattr(kwargs.get("generation_config"), "use_cache", None))
        if given(kwargs) is None and asked is not False and not block.over:
            # Also where the model's own settings have it off, such as after a training.
            kwargs |= {**passed_to_generate(new_cache()), "use_cache": True}
        return generate(*args, **kwargs)

    def calling(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        use_cache = kwargs.get("use_cache")
        wanted = (
            model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
        )
        if given(kwargs) is None and wanted and not model.training:
            kwargs = {**kwargs, name: new_cache()}
        return args, kwargs

    (name,) = passed(model, None)
    block = _Block(vars(model).get("generate"))
    generating._kvsketch_block = block  # type: ignore[attr-defined]
    model.generate = generating
    model.init_continuous_batching = _refused
    hook = model.register_forward_pre_hook(calling, with_kwargs=True)
    try:
        yield caches
    finally:
        hook.remove()
        block.over = True
        # Blocks of several threads may end in any order: what is below one that goes on stays.
        while (last := _block_of(model)) is not None and last.over:
            if last.before is None:
                del model.generate
            else:
                model.generate = last.before
        if last is None:
            vars(model).pop("init_continuous_batching", None)


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "continuous batching (generate_batch) makes a cache of its own, which compressing cannot "
        "replace: call generate, or serve the model with vLLM and kvsketch's plugin"
    )


@dataclass
class _Block:
    """A block, and what stood in the place of its ``generate`` when it began."""

    before: Any
    over: bool = False


def _block_of(model: PreTrainedModel) -> _Block | None:
    """The block that began last of those whose ``generate`` is still there."""
    return getattr(vars(model).get("generate"), "_kvsketch_block", None)
