"""PyramidKV: SnapKV with more slots in low layers than in high ones."""

from __future__ import annotations

from ..errors import InputError
from .snapkv import SnapKV, check_count


class PyramidKV(SnapKV):
    """SnapKV's scores; the layers' budgets fall from the first layer to the last.

    The scores are SnapKV's to the bit. What PyramidKV adds is the budget schedule,
    ``pyramid_shares``: a compressor sees one layer, so the cache applies it.
    """

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression (2406.02069)"


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
    kvpress's number of slots in that layer, its window included.

    Args:
        num_layers: layers that are compressed, >= 1.
        beta: steepness, >= 1; 1 means the same everywhere.
        budget: average slots per layer, the recent window included. None: a prompt long enough
            that no case above applies.
        tokens: tokens of the prompt; given if and only if ``budget`` is.
        window: the recent window, which every layer must have room for, >= 1.

    Returns:
        ``num_layers`` floats >= 0 with mean 1, largest first.

    Raises:
        InputError: an argument out of range, or only one of ``budget`` and ``tokens``.
    """
    check_count("num_layers", num_layers)
    check_count("window", window)
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not beta >= 1:
        raise InputError(f"beta={beta!r} must be a number >= 1")
    if (budget is None) != (tokens is None):
        raise InputError(f"budget={budget!r} and tokens={tokens!r}: give both or neither")
    low = 1 / beta
    high = 2 - low
    if budget is not None and tokens is not None:
        if isinstance(budget, bool) or not 0 < budget <= tokens:
            raise InputError(f"budget={budget!r} must be above 0 and at most tokens={tokens!r}")
        least, most = budget / beta, budget * 2 - budget / beta
        if most >= tokens - window:
            most = tokens - window
            least = budget * 2 - most
        if not most >= least >= window:
            return [1.0] * num_layers
        high, low = most / budget, least / budget
    if num_layers == 1:
        return [1.0]
    step = (high - low) / (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]
