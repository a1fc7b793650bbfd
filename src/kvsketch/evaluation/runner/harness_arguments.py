"""The ``--model_args`` of ``kvsketch-lm-eval``, as far as they can be checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsketch.arguments import check_arguments
from kvsketch.errors import InputError, at_least
from kvsketch.evaluation.runner import hub
from kvsketch.evaluation.runner.setups import EXACT

_GOAL = ("budget", "tolerance", "allocation", "bits")
_REST = ("sink", "recent", "prefill")
#: arguments that change the model's usual configuration
_ELSEWHERE = ("revision", "subfolder", "gguf_file")


def check_model_args(given: Mapping[str, Any]) -> None:
    """All given arguments, by name; those of the harness itself are not checked.

    Raises:
        InputError: an invalid value, or a model that is neither local nor available from the Hub.
    """
    for name in ("sink", "recent", "seed"):
        if given.get(name) is not None:
            at_least(name, given[name], 0)
    if not isinstance(given.get("one_shot", False), bool):
        raise InputError(f"one_shot={given['one_shot']!r} must be True or False")
    method = given.get("method", "heavy_merge")
    goal = {name: given[name] for name in _GOAL if name in given}
    if method != EXACT:
        check_arguments(method, **goal, **{name: given[name] for name in _REST if name in given})
    else:
        for name, value in goal.items():
            if value not in (None, 16):
                raise InputError(f"{name}={value!r} has no effect with method={EXACT!r}")
    model = given.get("pretrained")
    if isinstance(model, str) and not Path(model).is_dir():
        if any(given.get(name) for name in _ELSEWHERE):
            hub.unreachable()  # then it is refused at once by what loads it
        else:
            hub.check_model(model, "pretrained")
