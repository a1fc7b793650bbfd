"""How many tokens a subset needs that stands for all of them: bounds that are newer than the
papers' theorems."""

from __future__ import annotations

import math

from kvsketch.errors import at_least
from kvsketch.theory.parameters import eps_in_range, exponential, number


def coreset_size(d: int, eps: float, radius: float) -> float:
    """The order of the smallest subset of keys and values with which attention is within ``eps`` of
    that over all of them: sqrt(d) e^radius / eps.

    Every set of keys and values of norm 1 has such a subset of size
    O(sqrt(d) e^(radius + o(radius)) / eps), for all queries of norm at most ``radius`` at once, and
    for some sets no subset of smaller order does (Liberty, Andoni and Kleiner 2026,
    arXiv:2605.05602, abstract). The constants are not stated; here they are 1. Keys of norm at most
    k and queries of norm at most q, scaled by 1/sqrt(d), are such a case with radius
    q k / sqrt(d); eps is then relative to the largest norm of a value.

    Args:
        d: head_dim, >= 1.
        eps: in (0, 1].
        radius: >= 0.

    Raises:
        InputError: an argument out of range, or a radius above 600.
    """
    at_least("d", d, 1)
    radius = number("radius", radius, ">= 0", lambda x: x >= 0)
    return math.sqrt(d) * exponential("radius", radius) / eps_in_range(eps)
