"""PyramidKV: SnapKV with more slots in low layers than in high ones."""

from __future__ import annotations

from kvsketch.budget import Budget
from kvsketch.errors import InputError, at_least
from kvsketch.methods.snapkv import SnapKV

_LONG = 1 << 40  # tokens; windows and roundings vanish beside it


class PyramidKV(SnapKV):
    """SnapKV's scores; the layers' budgets fall from the first layer to the last.

    The scores are SnapKV's to the bit. What PyramidKV adds is the budget schedule,
    ``pyramid_shares``: a compressor sees one layer, so the cache applies it.
    """

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression (2406.02069)"

    @staticmethod
    def shares(layers: int, budget: Budget, recent: int) -> list[float]:
        """``pyramid_shares`` for a prompt of unknown length, taken to be long."""
        value, window = budget.value, max(1, recent)
        if isinstance(value, int):
            return pyramid_shares(layers, budget=value, window=window)
        return pyramid_shares(layers, budget=value * _LONG, tokens=_LONG, window=window)


def pyramid_shares(
    num_layers: int,
    beta: float = 20.0,
    *,
    budget: float | None = None,
    tokens: int | None = None,
    window: int = 1,
) -> list[float]:
    """Each layer's share of the average budget: an arithmetic sequence with mean 1.

    Section 3.2 of PyramidKV as the authors' code and kvpress's PyramidKVPress have it: with an
    average of ``budget`` slots per layer, the last layer gets budget / beta and the first
    2 * budget - budget / beta. Two cases depend on the prompt: the first layer gets at most
    ``tokens - window`` (the last then gets more, the mean stays), and where a layer would get less
    than ``window`` the schedule is given up and every share is 1. ``round(share * budget)`` is
    kvpress's number of slots in that layer, its window included (save for a model of one layer, to
    which kvpress gives what it gives a first one).

    Args:
        num_layers: layers that are compressed, >= 1.
        beta: steepness, >= 1; 1 means the same everywhere.
        budget: average slots per layer, the recent window included. None: large enough that
            neither case applies.
        tokens: tokens of the prompt, at least ``budget``. None: so many that the first layer may
            have all it asks for.
        window: the recent window, which every layer must have room for, >= 1.

    Returns:
        ``num_layers`` floats >= 0 with mean 1, largest first.

    Raises:
        InputError: an argument out of range, or ``tokens`` without ``budget``.
    """
    at_least("num_layers", num_layers, 1)
    at_least("window", window, 1)
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not beta >= 1:
        raise InputError(f"beta={beta!r} must be a number >= 1")
    if budget is None:
        if tokens is not None:
            raise InputError(f"tokens={tokens!r} has no effect without budget")
        high, low = 2 - 1 / beta, 1 / beta
    else:
        if isinstance(budget, bool) or not budget > 0:
            raise InputError(f"budget={budget!r} must be a number above 0 (slots per layer)")
        if tokens is not None and tokens < budget:
            raise InputError(f"tokens={tokens!r} must be at least budget={budget!r}")
        least = budget / beta
        most = budget * 2 - least
        if tokens is not None and most >= tokens - window:
            most = float(tokens - window)
            least = budget * 2 - most
        if not most >= least >= window:
            return [1.0] * num_layers
        high, low = most / budget, least / budget
    if num_layers == 1:
        return [1.0]
    step = (high - low) / (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]
