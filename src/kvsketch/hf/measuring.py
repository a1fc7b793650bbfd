"""Errors of a model's heads on typical prompts, and the budgets that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache import windowed
from kvsketch.cache.curves import Curves, of_layers, pooled
from kvsketch.cache.held_out import LEVELS, answers, measure_layer
from kvsketch.errors import InputError
from kvsketch.hf.activations import capture_compressed
from kvsketch.observed import Observed
from kvsketch.slots import Slots


def measure_curves(
    model: Any,
    prompts: Sequence[Tensor],
    method: str,
    *,
    follow: int = 64,
    sink: int = 4,
    recent: int = 32,
    levels: Sequence[float] = LEVELS,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Curves:
    """Errors of every KV head at several sizes, measured on typical prompts.

    The rest of a prompt is compressed and the error is measured on the queries of its last
    ``follow`` tokens (see ``cache.held_out.measure_layer``).

    Args:
        model: a transformers causal language model.
        prompts: token ids, ``[1, n]`` each; n above sink + recent + follow.
        method: a name in ``kvsketch.ALL_METHODS``.
        levels: increasing fractions of the tokens between sinks and recent window; the last one is
            1.
        options: options of the method.

    Raises:
        InputError: a prompt too short, or no prompt.
        UnsupportedError: a model that caches latents, or whose attention cannot be caught.
    """
    if not prompts:
        raise InputError("prompts is empty: at least one is needed to measure with")
    for prompt in prompts:
        check_length(prompt, sink + recent + follow, len(levels))

    def compress(slots: Slots, budget: int, observed: Observed) -> Slots:
        reduce = windowed(method, sink, recent, seed, options)
        return reduce(slots, budget, observed, scored=True)

    found = []
    for prompt in prompts:
        layers = [
            measure_layer(
                slots,
                observed,
                compress,
                follow,
                sink,
                recent,
                levels,
                windowed(method, sink, recent, seed, options).observe,
            )
            for slots, observed in capture_compressed(model, prompt)
        ]
        found.append(of_layers(layers))
    return pooled(found)


def check_length(prompt: Tensor, exact: int, levels: int = len(LEVELS)) -> None:
    """Raise InputError unless a prompt has tokens to compress besides ``exact`` ones."""
    tokens, least = int(prompt.shape[-1]), exact + levels
    if tokens <= least:
        raise InputError(f"a prompt of {tokens} tokens is too short: more than {least} are needed")


def answer_later(slots: Slots, later: Slots, queries: Tensor, scaling: float) -> Tensor:
    """Attention of held-back queries over slots and, causally, over their own tokens."""
    return answers(slots, later, Observed(queries, scaling))


def measure_schedule(
    model: Any, prompts: Sequence[Tensor], method: str, budget: float, **settings: Any
) -> list[list[float]]:
    """A schedule for ``SketchCache(allocation=...)``: the total of an even ``budget``, allocated
    where the measured error falls most. It depends on the model, the method and the kind of prompt,
    not on a single prompt: measure once and keep the list (or, for every budget, the curves:
    ``SketchCache(allocation=curves)``).

    Args:
        budget: kept fraction of the tokens (float in (0, 1]); others as for ``measure_curves``.

    Raises:
        InputError: as ``measure_curves`` and ``Curves.allocate``.
    """
    fraction = Budget(float(budget)).value
    return measure_curves(model, prompts, method, **settings).allocate(float(fraction))
