"""What is done to a cache between turns: pinning tokens, and compressing it to a budget now."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache import Stream
from kvsketch.errors import InputError
from kvsketch.hf import accounting
from kvsketch.hf.forward import Forward


def pin(streams: Sequence[Stream], budget: Budget | None, start: int, end: int) -> None:
    """See ``SketchCache.pin``; ``budget``: that of the cache, if it has one."""
    most = None if budget is None else budget.value
    for stream in streams:
        tried = copy.deepcopy(stream.pins)
        tried.add(start, end)
        needed = sum(stream.method.around) + tried.tokens + 1
        if isinstance(most, int) and needed > most:
            raise InputError(
                f"pin({start}, {end}): sinks, recent and pinned tokens are {needed - 1}, and "
                f"budget={most} must be larger"
            )
    for stream in streams:
        stream.pin(start, end)


def compact(forward: Forward, budget: Budget) -> dict[str, Any]:
    """See ``SketchCache.compact``.

    Args:
        forward: of the cache, between two forwards.
        budget: what the layers are compressed to.
    """
    streams, layers = [layer.stream for layer in forward.sketches], forward.layers
    if not streams[0].seen:
        raise InputError("compact(): the cache is empty")
    for layer in forward.sketches:
        method = layer.stream.compressor
        if layer.lossless and method is not None and method.requires.queries:
            raise InputError(
                f"compact(): {method.name} chooses by queries, and a cache with "
                "budget=1.0 keeps none: make it with a budget below 1, such as 0.9999"
            )
    least, slots = sum(streams[0].around) + 1, budget.slots(streams[0].seen)
    if slots < least:
        raise InputError(
            f"compact({budget.value!r}) keeps {slots} tokens, and sinks, recent and pinned tokens "
            f"are {least - 1}"
        )
    forward.settle_part(answers=False)
    before = accounting.mean_held(layers), forward.nbytes()
    own = accounting.alone(layers)
    forward.plan.compact(streams, budget)
    forward.masks.settled = True
    error, now = accounting.known_error(layers)
    return {
        "slots": (before[0], accounting.mean_held(layers)),
        "kv_bytes": (before[1], forward.nbytes()),
        "error": sum(error) / len(error) if error and now else None,
        "dropped": None if own is None else _dropped(own, layers),
    }


def _dropped(before: Tensor, layers: Sequence[Any]) -> list[list[int]]:
    """The tokens of each row without a slot of their own that had one ``before``."""
    now = accounting.alone(layers)
    assert now is not None
    return [row.nonzero().flatten().tolist() for row in (before > 0) & (now == 0)]
