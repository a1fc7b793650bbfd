"""The argument by which a model takes its cache: ``cache`` since transformers 5.24, before that
``past_key_values``, which code from the hub may still expect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

_NAMES = ("cache", "past_key_values")


def passed(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives ``cache`` to a forward of ``model``."""
    return {_name(type(model).forward): cache}


def passed_to_generate(cache: Any) -> dict[str, Any]:
    """The keyword argument that gives ``cache`` to ``generate``."""
    return {_expected(): cache}


def given(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, under either name, or None."""
    return next((arguments[n] for n in _NAMES if arguments.get(n) is not None), None)


@functools.cache
def _name(forward: Callable[..., Any]) -> str:
    taken = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in taken), _expected())


@functools.cache
def _expected() -> str:
    """The name of this version of transformers."""
    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in _NAMES if name in taken)
