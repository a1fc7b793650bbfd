"""Few dimensions: the lower bounds (Theorem 1, Corollary 9) and upper bounds (Lemma 14, Theorem 15)
of "Compression Barriers", with every constant; and how many tokens a subset needs that stands for
all of them, by a bound that is newer than the papers' theorems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvsketch.errors import at_least
from kvsketch.theory.parameters import (
    SubGenSize,
    covering_number,
    eps_in_range,
    exponential,
    number,
    subgen,
)

#: The cluster radius of Theorem 15 for keys of norm at most 1.
UNIT_BALL_DELTA = math.e / 3


@dataclass(frozen=True)
class Barrier:
    """The result of the proof of Theorem 1 and Corollary 9 for d dimensions.

    Attributes:
        c_u: Theorem 6's constant: n keys need d >= c_u ln n.
        rows: nearly orthonormal keys that Lemma 3 gives in d dimensions: e^(d/c_u), at most n.
        bits: the memory that every algorithm needs, d rows (1 - H(1/3)).
        query_norm: the largest norm of Bob's queries. The bound holds only for algorithms that
            answer queries of this norm.
    """

    c_u: float
    rows: int
    bits: float
    query_norm: float


def barrier(n: int, d: int, eps: float = 0.1) -> Barrier:
    """The lower bound of Theorem 1 and Corollary 9, with its constants.

    Theorem 6 needs d >= C_u ln n, C_u = 12/(eps^2 - eps^3) by Lemma 3: 1,333.3 at the paper's
    eps = 0.1 and 96 where eps tends to 1/2. In fewer dimensions the same reduction works with
    e^(d/C_u) rows, so it proves d e^(d/C_u) bits. Corollary 9 and Theorem 1 print d e^d: the
    constant in the exponent is lost. Theorem 5 (23) adds the factor 1 - H(1/3) = 0.08, H the
    binary entropy.

    Nevertheless, d e^d is a correct, though weak, bound if queries may have any norm: distinct unit
    vectors on a circle can be distinguished by C <q, k> with large C, so that d = 2 is enough for n
    rows and n d bits. However, it cannot be compared with Theorem 15, in which queries have norm
    O(log log n) (here 2 ln(rows)/(1 - 2 eps)), and the guarantee is eps |softmax|_2 |V|_op and not
    a factor 1 +- eta in every coordinate. No bit of the INDEX instance can be read from the former.

    Args:
        n: tokens.
        d: head_dim and value_dim, >= 2.
        eps: in (0, 1/2); the paper has 0.1.

    Raises:
        InputError: an argument out of range.
    """
    at_least("n", n, 1)
    at_least("d", d, 2)
    eps = number("eps", eps, "in (0, 1/2)", lambda x: 0 < x < 0.5)
    c_u = 12 / (eps**2 - eps**3)
    rows = n if d / c_u >= math.log(n) else math.floor(math.exp(d / c_u))
    stretch = 2 * math.log(rows) / (1 - 2 * eps)
    return Barrier(c_u, rows, index_bits(rows * d), stretch * math.sqrt(1 + eps))


def index_bits(n: int, error: float = 1 / 3) -> float:
    """Bits of Alice's message in INDEX (Definition 4, Theorems 5 and 23) if Bob errs with
    probability at most ``error``: n (1 - H(error)), H the binary entropy.

    Args:
        n: bits of Alice, >= 1.
        error: in (0, 1/2).

    Raises:
        InputError: an argument out of range.
    """
    at_least("n", n, 1)
    error = number("error", error, "in (0, 1/2)", lambda x: 0 < x < 0.5)
    entropy = -error * math.log2(error) - (1 - error) * math.log2(1 - error)
    return n * (1 - entropy)


def clusters_in_ball(d: int, delta: float, radius: float = 1.0) -> int:
    """Clusters of radius delta that SubGen finds at most among keys of norm at most ``radius``,
    whatever their number and order: its representatives are more than delta apart (Lemma 2), and
    no more such points fit into the ball. The least of three bounds:

    - volume: balls of radius delta/2 around them are disjoint, (1 + 2 radius/delta)^d;
    - d = 1: 2 radius/delta, rounded up; d = 2: Oler's inequality,
      2/sqrt(3) pi x^2 + pi x + 1 with x = radius/delta;
    - a sphere (after Rankin 1955): (k, sqrt(radius^2 - |k|^2)) lies on half a sphere in d + 1
      dimensions, no nearer to the others than k is. With c the largest cosine between two and
      cos b = sqrt(c), give each point the weight (cos a - cos b)_+ at angle a from it. Where j of
      them reach, their cosines add up to at most sqrt(j + j (j - 1) c), so their weights to at
      most (1 - c)/(2 sqrt(c)): that times the area within b of half the sphere, over the weight
      of one point. For delta < sqrt(2) radius.

    At delta = (e/3) radius, Theorem 15's, this is at most e^d, rounded up, for d <= 2 and d >= 6
    (32, 82 and 167 against 21, 55 and 149 in between), which Lemma 14 does not prove.

    Raises:
        InputError: d < 1, delta or radius not a number > 0, or a result beyond e^600.
    """
    at_least("d", d, 1)
    delta = number("delta", delta, "> 0", lambda x: x > 0)
    radius = number("radius", radius, "> 0", lambda x: x > 0)
    ratio = radius / delta
    if ratio <= 0.5:
        return 1
    if d == 1:
        return math.ceil(2 * ratio)
    covering_number(d, delta, radius)  # raises an error if the number is too large
    bounds = [math.exp(d * math.log1p(2 * ratio))]
    if d == 2:
        bounds.append(2 / math.sqrt(3) * math.pi * ratio**2 + math.pi * ratio + 1)
    if ratio > math.sqrt(0.5):
        bounds.append(_on_half_a_sphere(d + 1, ratio))
    return math.floor(min(bounds) * (1 + 1e-9))


def low_dimensional(
    eps: float,
    r: float,
    d: int,
    failure: float = 0.01,
    value_dim: int | None = None,
    radius: float = 1.0,
) -> SubGenSize:
    """s, t and the number of clusters of Theorem 15 for ``SubGen.for_ball``: ``subgen`` at
    delta = (e/3) radius, where ``clusters_in_ball`` bounds the clusters with no assumption but the
    norm of the keys.

    The number of tokens is not among the arguments: the log n of Theorem 11 is a union bound over
    clusters, and there are at most m of them however long the stream. (The theorem lets queries
    grow, r = O(log log n), and t = O(e^(2 delta r) log m/eps^2) with them. Its "bits" are numbers,
    as in SubGen.)

    Args:
        eps: in (0, 1].
        r: bound on |q|, >= 0, scaling included.
        d: head_dim.
        failure: in (0, 1).
        value_dim: default d.
        radius: bound on |k|; the paper has 1.

    Raises:
        InputError: an argument out of range, or 2 delta r > 600.
    """
    radius = number("radius", radius, "> 0", lambda x: x > 0)
    delta = UNIT_BALL_DELTA * radius
    clusters = clusters_in_ball(d, delta, radius)
    dim = d if value_dim is None else value_dim
    return subgen(eps, delta, r, clusters, dim, failure, m=clusters)


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


def _on_half_a_sphere(n: int, ratio: float) -> float:
    """The third bound of ``clusters_in_ball``, for a sphere in n dimensions."""
    cosine = 1 - 0.5 / ratio**2
    reach = math.acos(math.sqrt(cosine))

    def ring(a: float) -> float:
        return math.sin(a) ** (n - 2)

    area = _simpson(ring, math.pi / 2 + reach)
    weight = _simpson(lambda a: ring(a) * (math.cos(a) - math.cos(reach)), reach)
    return (1 - cosine) / (2 * math.sqrt(cosine)) * area / weight


def _simpson(f: Callable[[float], float], end: float, steps: int = 4000) -> float:
    """The integral of f from 0 to end."""
    inner = sum((4 if i % 2 else 2) * f(end * i / steps) for i in range(1, steps))
    return (f(0.0) + inner + f(end)) * end / steps / 3
