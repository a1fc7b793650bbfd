"""95% intervals of a mean score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvsketch.errors import InputError

_Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution


def wilson_interval(correct: int, cases: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion, which is also valid near 0 and 1 and for few
    cases.

    Raises:
        InputError: unless 0 <= correct <= cases and cases >= 1.
    """
    if cases < 1 or not 0 <= correct <= cases:
        raise InputError(f"need 0 <= correct <= cases and cases >= 1, got {correct} of {cases}")
    share, z2 = correct / cases, _Z95**2
    centre = (share + z2 / (2 * cases)) / (1 + z2 / cases)
    spread = share * (1 - share) / cases + z2 / (4 * cases**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / cases)
    # At 0 and at `cases` one end is exact; rounding would leave it a hair off.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == cases else centre + half
    return low, high


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of scores in [0, 1]: Wilson's where all are 0 or 1, else the normal
    one, cut to [0, 1].

    Raises:
        InputError: no scores.
    """
    low, high = normal_interval(scores)
    if all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(round(sum(scores)), len(scores))
    return max(0.0, low), min(1.0, high)


def normal_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of a mean, from the standard deviation of the values; a single value is its own
    interval.

    Raises:
        InputError: no values.
    """
    if not values:
        raise InputError("an interval needs at least one score")
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1)
    half = _Z95 * math.sqrt(variance / n)
    return mean - half, mean + half
