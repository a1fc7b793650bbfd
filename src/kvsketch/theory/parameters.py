"""Calculators: how large a sketch the theorems ask for, every constant stated and derived."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ..errors import InputError, at_least

# Beyond e^600 a number of slots is no longer worth a float.
_LARGEST_EXPONENT = 600.0


class _Size(ABC):
    """What a theorem asks for."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Slots per KV head."""

    def verdict(self, n: int) -> str:
        """What ``slots`` means for n tokens, in words.

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
class SubGenSize(_Size):
    """Parameters for ``kvsketch.streaming.SubGen``.

    Attributes:
        s: numerator samples.
        t: samples per cluster.
        tail: the inequality that gave t: "chernoff", "hoeffding" or "bernstein".
        clusters: m; None: unknown. ``slots`` then counts one cluster, the least there can be.
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
    failure probability inside a logarithm (McDiarmid, as in Drineas, Kannan and Mahoney) is not to
    be had: with probabilities from |v| alone a single term, a_i/|v_i|, has no bound.

    Denominator. Keys of a cluster lie within delta of its representative, so exp<q, k> varies by
    at most B = e^(2 delta r) in it. The mean of t samples is within 1 +- e, e = eps/3, in all
    clusters by a union bound over m (n where m is None); see ``samples_within`` for t.

    Together, as |Attn|_2 <= |softmax|_2 |V|_op: (e + e)/(1 - e) <= eps for eps <= 1.

    Args:
        eps: in (0, 1].
        delta: cluster radius, > 0, in units of the keys. After a merge, or where delta was
            widened, keys lie within 2 delta: pass that.
        r: bound on |q|, >= 0. The paper has no 1/sqrt(d) in the scores; for real models q
            includes the scaling: r = scaling times the query norm.
        n: tokens.
        d: value_dim.
        failure: in (0, 1).
        m: clusters at most; see ``clusters_for_diameter`` and ``clusterability``.

    Raises:
        InputError: an argument out of range, or 2 delta r > 600.
    """
    eps, failure = _eps(eps), _failure(failure)
    delta = number("delta", delta, "> 0", lambda x: x > 0)
    r = number("r", r, ">= 0", lambda x: x >= 0)
    at_least("n", n, 1)
    at_least("d", d, 1)
    if m is not None:
        at_least("m", m, 1)
    factor = _exp("2 delta r", 2 * delta * r)
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
class BalanceKVSize(_Size):
    """Parameters for ``kvsketch.streaming.BalanceKVStreaming``.

    Attributes:
        t: batch size, even.
        levels: T = log2(n/t), rounded up, at least 1.
        buckets: value-norm buckets that can be alive at once.
        delta: the walk's failure parameter, c = constant log(t/delta).
    """

    t: int
    levels: int
    buckets: int
    delta: float

    @property
    def slots(self) -> int:
        """All cells full in every bucket and in the denominator: (buckets + 1)(T + 1) t."""
        return (self.buckets + 1) * (self.levels + 1) * self.t


def balancekv(
    eps: float,
    r: float,
    n: int,
    d: int,
    failure: float = 0.01,
    value_dim: int | None = None,
    constant: float = 30.0,
    queries: int = 1,
) -> BalanceKVSize:
    """Batch size and levels of BalanceKV, Theorem 3.1: |z - Attn|_2 <= eps |softmax|_2 |V|_F with
    probability at least 1 - failure for ``queries`` queries fixed in advance (n: one per step).

    With rho = r^2/sqrt(d) and s = value_dim:

    - The walk (Theorem 3.4). With a = c R^2, its signed sum is sub-Gaussian; its proxy grows by
      sigma^2 <- sigma^2 + |f|^2 (1 + sigma^2 (|f|^2 - 2a)/a^2)_+, so it never exceeds the fixed
      point sigma^2 = R^2 c^2/(2c - 1) (Dwivedi and Mackey, Kernel Thinning, Theorem 3). It fails
      with probability at most 2t e^(1/2 - c) <= 2 sqrt(e) delta, as constant >= 1.
    - One call (Theorem 3.2). |u| = e^(rho/2), R = e^(rho/2) v_max; a union bound over coordinates
      gives an error of sqrt(s) kappa e^rho v_max, kappa = c/sqrt(2c-1) sqrt(2 ln(2s/beta)), with
      probability 1 - beta. (The proof runs the walk with delta/s, Algorithm 2 prints delta; with s
      in kappa it does not matter.)
    - All calls, fewer than N = 4n/t: delta = failure/(8N), beta = failure/(2N queries).
    - Levels (Theorem 3.3). Keeping the smaller side biases the errors, so they add up: T (n/t)
      times that of one call. As exp(<k,q>/sqrt(d)) >= e^-rho, this is T kappa e^(2 rho)/t of the
      denominator.
    - Buckets (Theorem 3.1). Bucket i holds 2^(i-1) <= |v| <= 2^i, so its sum of norms may be half
      of the sum of the 2^i: the proof, which has 2^(i-1) as the upper end too, loses a factor 2.
      Numerator: 2 T sqrt(s) kappa e^(2 rho)/t = eps/3, hence t = 6 T sqrt(s) kappa e^(2 rho)/eps,
      solved for the smallest even t (it is also in T and N).
    - The denominator's error is then at most eps/6 and what line 9 erases adds at most
      eps/(2 sqrt(n)), which the proof leaves out: (1/3 + 1/6 + 1/(2 sqrt(n))) eps/(1 - eps/6) is
      at most eps where anything is sampled at all.

    Typos: Algorithm 1 line 4 means 2^(i-1) <= |v| <= 2^i, line 9 2n instead of 2^n.

    Args:
        eps: in (0, 1].
        r: bound on the norms of queries and keys, >= 0; scores are <q, k>/sqrt(d).
        n: tokens at most.
        d: head_dim.
        failure: in (0, 1).
        value_dim: s, default d.
        constant: of c, >= 1; the paper has 30.
        queries: >= 1.

    Raises:
        InputError: an argument out of range, or 2 r^2/sqrt(d) > 600.
    """
    eps, failure = _eps(eps), _failure(failure)
    r = number("r", r, ">= 0", lambda x: x >= 0)
    constant = number("constant", constant, ">= 1", lambda x: x >= 1)
    at_least("n", n, 1)
    at_least("d", d, 1)
    at_least("queries", queries, 1)
    s = d if value_dim is None else at_least("value_dim", value_dim, 1)
    rho = r * r / math.sqrt(d)
    growth = _exp("2 r^2/sqrt(d)", 2 * rho)

    def levels(t: int) -> int:
        return max(1, math.ceil(math.log2(n / t)))

    def delta(t: int) -> float:
        return failure / (32 * max(1.0, n / t))

    def required(t: int) -> float:
        c = constant * math.log(t / delta(t))
        beta = 4 * delta(t) / queries
        kappa = c / math.sqrt(2 * c - 1) * math.sqrt(2 * math.log(2 * s / beta))
        return 6 * levels(t) * math.sqrt(s) * kappa * growth / eps

    # required() falls in t up to n and then grows like the root of a logarithm: one crossing
    low, high = 0, 1
    while 2 * high < required(2 * high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if 2 * middle >= required(2 * middle) else (middle, high)
    t = 2 * high
    buckets = min(n, math.ceil((math.log(4 * n / eps) + rho) / math.log(2)))
    return BalanceKVSize(t, levels(t), buckets, delta(t))


@dataclass(frozen=True)
class SlidingWindowSize(_Size):
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

    Values must be nonnegative (the theorem forgets to say so: its step E[O^2] <= v_max E[O] needs
    it). T = 3 v_max/(eps^2 mean) makes one average fail with probability at most 1/3 (Chebyshev).
    The median fails only if Q/2 averages do, in either direction: e^(-Q/18) by Hoeffding, so
    Q = 18 ln(n d/failure). The paper's e^(-Q/12) drops a 3 (the Chernoff bound it uses is
    e^(-Q/36)) and is false: the true exponent is about Q/17.

    ``kvsketch.streaming.sliding_window.SlidingWindow`` needs none of this: it keeps the sum of the
    values outside, which is exact, in one slot.

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
    eps, failure = _eps(eps), _failure(failure)
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
    """``value`` as a float if it is a finite number with ``ok(value)``.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}={value!r} must be a number {allowed}")
    if not (math.isfinite(value) and ok(value)):
        raise InputError(f"{name}={value!r} must be a number {allowed}")
    return float(value)


def _eps(eps: float) -> float:
    return number("eps", eps, "in (0, 1]", lambda x: 0 < x <= 1)


def _failure(failure: float) -> float:
    return number("failure", failure, "in (0, 1)", lambda x: 0 < x < 1)


def _ratio(d: int, delta: float, radius: float) -> Fraction:
    """radius/delta of the numbers as written: 1/0.1 is 10."""
    at_least("d", d, 1)
    delta = number("delta", delta, "> 0", lambda x: x > 0)
    radius = number("radius", radius, "> 0", lambda x: x > 0)
    return Fraction(repr(radius)) / Fraction(repr(delta))


def _exp(name: str, exponent: float) -> float:
    if exponent > _LARGEST_EXPONENT:
        raise InputError(
            f"{name}={exponent:.6g} must be at most {_LARGEST_EXPONENT:.0f}: the theorem's "
            f"e^({name}) samples are beyond all meaning"
        )
    return math.exp(exponent)


def _power(base: Fraction, d: int) -> int:
    _exp("d log(base)", d * math.log(base))
    return math.floor(base**d)
