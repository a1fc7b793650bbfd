"""Calculators of the size of a sketch that the theorems require, with every constant derived."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from kvsketch.errors import InputError, at_least

# The largest exponent of a number of slots: a larger number is meaningless and raises an error.
_LARGEST_EXPONENT = 600.0


class Size(ABC):
    """The parameters that a theorem requires."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Slots per KV head."""

    def verdict(self, n: int) -> str:
        """A comparison of ``slots`` with n tokens, in words.

        Raises:
            InputError: n < 1.
        """
        at_least("n", n, 1)
        needed = f"{self.slots:,}" if self.slots < 10**15 else f"{float(self.slots):.1e}"
        if self.slots >= n:
            return (
                f"needs {needed} slots, no fewer than the {n:,} tokens themselves: the theorem "
                "says nothing useful here"
            )
        return f"needs {needed} slots, {self.slots / n:.1%} of the {n:,} tokens"


@dataclass(frozen=True)
class SubGenSize(Size):
    """Parameters for ``kvsketch.methods.sketches.SubGen``.

    Attributes:
        s: numerator samples.
        t: samples per cluster.
        tail: the inequality that gave t: "chernoff", "hoeffding" or "bernstein".
        clusters: m. None: unknown, and ``slots`` then counts one cluster, the smallest number.
    """

    s: int
    t: int
    tail: str
    clusters: int | None

    @property
    def slots(self) -> int:
        return self.s + self.t * (self.clusters or 1)


def subgen(
    eps: float,
    delta: float,
    r: float,
    n: int,
    d: int,
    failure: float = 0.01,
    m: int | None = None,
) -> SubGenSize:
    """s and t of SubGen, Theorem 1 (ClusterGen Theorem 2.2): for one query fixed in advance,
    |z - Attn|_2 <= eps |softmax(Kq)|_2 |V|_op with probability at least 1 - failure.

    Numerator. Each of the s samples has mean a^T V (a = exp(Kq)), and rows are drawn in proportion
    to |v|^2, so E|error|^2 = (|a|^2 |V|_F^2 - |a^T V|^2)/s <= d |a|^2 |V|_op^2 / s. Chebyshev at
    (eps/3) |a| |V|_op with failure/2 gives s = 18 d/(eps^2 failure), 1,800 d/eps^2 at 0.01. A
    failure probability inside a logarithm (McDiarmid, as in Drineas, Kannan and Mahoney) is not
    possible, because with probabilities from |v| alone a single term, a_i/|v_i|, has no bound.

    Denominator. Keys of a cluster lie within delta of its representative, so exp<q, k> varies by
    at most B = e^(2 delta r) in it. The mean of t samples is within 1 +- e, e = eps/3, in all
    clusters by a union bound over m (n where m is None); see ``samples_within`` for t.

    Together, as |Attn|_2 <= |softmax|_2 |V|_op: (e + e)/(1 - e) <= eps for eps <= 1.

    Memory. d (m t + s) numbers. Corollary 1 (B.5) has m n^o(1) d/eps^2 for delta r = o(log n): t is
    n^o(1) then, but s = O(d/eps^2) is left out, so d must be at most m n^o(1). (Theorem 1 says
    that the output satisfies equation 1, which defines attention; 3 is meant, ClusterGen's 2. The
    second half of ClusterGen's B.5 repeats the first; SubGen has d n^(1 - Omega(1)) there.)

    Args:
        eps: in (0, 1].
        delta: cluster radius, > 0, in units of the keys. After a merge, or where delta was
            widened, keys lie within 2 delta: pass that.
        r: bound on |q|, >= 0. The paper has no 1/sqrt(d) in the scores; for real models q
            includes the scaling: r = scaling times the query norm.
        n: tokens.
        d: value_dim.
        failure: in (0, 1).
        m: the largest number of clusters, see ``clusters_for_diameter`` and ``clusterability``.

    Raises:
        InputError: an argument out of range, or 2 delta r > 600.
    """
    eps, failure = eps_in_range(eps), failure_in_range(failure)
    delta = number("delta", delta, "> 0", lambda x: x > 0)
    r = number("r", r, ">= 0", lambda x: x >= 0)
    at_least("n", n, 1)
    at_least("d", d, 1)
    if m is not None:
        at_least("m", m, 1)
    factor = exponential("2 delta r", 2 * delta * r)
    tails = samples_within(factor, eps / 3, failure / 2 / (n if m is None else m))
    tail = min(tails, key=lambda name: tails[name])
    return SubGenSize(math.ceil(18 * d / (eps**2 * failure)), tails[tail], tail, m)


def samples_within(factor: float, error: float, failure: float) -> dict[str, int]:
    """I.i.d. samples t so that their mean lies within (1 +- error) of the true mean mu with
    probability 1 - failure, for values in [x, B x], B = ``factor``. With L = ln(2/failure):

    - Chernoff, P <= 2 exp(-error^2 t mu/(3 B x)): t = 3 B L/error^2.
    - Hoeffding, range (B-1) x and mu >= x: t = (B-1)^2 L/(2 error^2).
    - Bernstein, variance <= (B x - mu)(mu - x) <= mu^2 (B-1)^2/(4B) and deviations at most
      (B-1) mu: t = ((B-1)^2/(2B) + 2 (B-1) error/3) L/error^2. Six times better than Chernoff for
      large B.
    """
    scale = math.log(2 / failure) / error**2
    spread = factor - 1
    sizes = {
        "chernoff": 3 * factor * scale,
        "hoeffding": spread * spread * scale / 2,
        "bernstein": (spread / (2 * factor) * spread + 2 * spread * error / 3) * scale,
    }
    return {name: max(1, math.ceil(min(size, 1e300))) for name, size in sizes.items()}


@dataclass(frozen=True)
class SlidingWindowSize(Size):
    """Parameters for ``SlidingWindowSampled`` (samples = per_mean x means) and its ``estimate``
    (groups = means).

    Attributes:
        per_mean: T, samples averaged.
        means: Q, averages of which the median is taken.
        means_as_printed: Q with the paper's e^(-Q/12), which is not enough.
    """

    per_mean: int
    means: int
    means_as_printed: int

    @property
    def slots(self) -> int:
        """Samples for the tokens outside the window; the window's own W come on top (once: the
        paper's O(d W ...) keeps a copy per sample without need)."""
        return self.per_mean * self.means


def sliding_window(
    eps: float, failure: float, v_max: float, mean: float, n: int = 1, d: int = 1
) -> SlidingWindowSize:
    """Median of means for sliding window attention, Theorem 25: all d coordinates at all n steps
    within a factor 1 +- eps with probability at least 1 - failure.

    Values must be nonnegative (the theorem does not say so, but its step E[O^2] <= v_max E[O] needs
    it). T = 3 v_max/(eps^2 mean) makes one average fail with probability at most 1/3 (Chebyshev).
    The median fails only if Q/2 averages do, in either direction: e^(-Q/18) by Hoeffding, so
    Q = 18 ln(n d/failure). The paper's e^(-Q/12) drops a 3 (the Chernoff bound it uses is
    e^(-Q/36)) and is false: the true exponent is about Q/17. Equation 56 has log(d/failure) where
    the union bound over all steps needs log(n d/failure).

    ``methods.sketches.sliding_window.SlidingWindow`` needs no samples: it keeps the sum of the
    values outside the window, which is exact, in one slot.

    Args:
        eps: in (0, 1].
        failure: in (0, 1).
        v_max: largest value, > 0.
        mean: smallest attention output, in (0, v_max].
        n: steps.
        d: value_dim.

    Raises:
        InputError: an argument out of range.
    """
    eps, failure = eps_in_range(eps), failure_in_range(failure)
    v_max = number("v_max", v_max, "> 0", lambda x: x > 0)
    mean = number("mean", mean, f"in (0, v_max={v_max}]", lambda x: 0 < x <= v_max)
    at_least("n", n, 1)
    at_least("d", d, 1)
    events = math.log(n * d / failure)
    return SlidingWindowSize(
        math.ceil(3 * v_max / (eps**2 * mean)),
        math.ceil(18 * events),
        math.ceil(12 * (events + math.log(2))),
    )


def covering_number(d: int, delta: float, radius: float = 1.0) -> int:
    """Balls of radius ``delta`` that suffice to cover a ball of ``radius`` in R^d:
    (3 radius/delta)^d, Lemma 13 of Compression Barriers (its "sphere" is the ball); 1 for
    delta >= radius.

    Also a bound on SubGen's clusters of radius delta, whose representatives are more than delta
    apart: at most (1 + 2 radius/delta)^d points are.

    Lemma 14 concludes that unit-norm keys are (e^d, e/3)-clusterable. Its proof does not show it:
    (3/delta)^d = e^d needs delta = 3/e > 1, and balls of radius delta give clusters of diameter
    2 delta under Definition 10. (The statement itself holds for d <= 2, by explicit partitions,
    and for large d, by Rogers' coverings.) Use ``clusters_for_diameter``.

    Raises:
        InputError: d < 1, delta or radius not a number > 0, or a result beyond e^600.
    """
    ratio = _ratio(d, delta, radius)
    return 1 if ratio <= 1 else _power(3 * ratio, d)


def clusters_for_diameter(d: int, delta: float, radius: float = 1.0) -> int:
    """m such that any keys of norm at most ``radius`` are (m, delta)-clusterable (Definition 10):
    (1 + 4 radius/delta)^d, what Lemma 14 should say; 1 for delta >= 2 radius.

    Take as many points as possible more than delta/2 apart. Balls of radius delta/4 around them
    are disjoint and lie in a ball of radius + delta/4, hence their number; every key lies within
    delta/2 of one of them, so keys with the same one are at most delta apart.

    Raises:
        InputError: as for ``covering_number``.
    """
    ratio = _ratio(d, delta, radius)
    return 1 if ratio <= Fraction(1, 2) else _power(1 + 4 * ratio, d)


def number(name: str, value: object, allowed: str, ok: Callable[[float], bool]) -> float:
    """Return ``value`` as a float if it is a finite number with ``ok(value)``.

    Raises:
        InputError: it is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}={value!r} must be a number {allowed}")
    if not (math.isfinite(value) and ok(value)):
        raise InputError(f"{name}={value!r} must be a number {allowed}")
    return float(value)


def eps_in_range(eps: float) -> float:
    return number("eps", eps, "in (0, 1]", lambda x: 0 < x <= 1)


def failure_in_range(failure: float) -> float:
    return number("failure", failure, "in (0, 1)", lambda x: 0 < x < 1)


def _ratio(d: int, delta: float, radius: float) -> Fraction:
    """radius/delta of the numbers in decimal notation, so that 1/0.1 is exactly 10."""
    at_least("d", d, 1)
    delta = number("delta", delta, "> 0", lambda x: x > 0)
    radius = number("radius", radius, "> 0", lambda x: x > 0)
    return Fraction(repr(radius)) / Fraction(repr(delta))


def exponential(name: str, exponent: float) -> float:
    if exponent > _LARGEST_EXPONENT:
        raise InputError(
            f"{name}={exponent:.6g} must be at most {_LARGEST_EXPONENT:.0f}: the theorem's "
            f"e^({name}) samples are too many to be meaningful"
        )
    return math.exp(exponent)


def _power(base: Fraction, d: int) -> int:
    exponential("d log(base)", d * math.log(base))
    return math.floor(base**d)
