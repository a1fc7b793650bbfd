"""BalanceKV's theorems as calculators: 3.1 (attention), 3.3 (MergeAndReduce), and the number of
tokens from which on 3.1 requires fewer slots than there are tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvsketch.errors import at_least
from kvsketch.theory.parameters import Size, eps_in_range, exponential, failure_in_range, number


@dataclass(frozen=True)
class MergeAndReduceSize(Size):
    """Parameters of one MergeAndReduce instance.

    Attributes:
        t: batch size, even.
        levels: T = log2(n/t), rounded up, at least 1.
        delta: the walk's failure parameter, c = constant log(t/delta).
    """

    t: int
    levels: int
    delta: float

    @property
    def slots(self) -> int:
        """The slots if all cells C^0 .. C^T are full: (T + 1) t."""
        return (self.levels + 1) * self.t


@dataclass(frozen=True)
class BalanceKVSize(MergeAndReduceSize):
    """Parameters for ``kvsketch.methods.sketches.BalanceKVStreaming``.

    Attributes:
        buckets: the largest number of value-norm buckets at once.
        others: as of ``MergeAndReduceSize``.
    """

    buckets: int

    @property
    def slots(self) -> int:
        """The slots if all cells of every bucket and of the denominator are full: (buckets + 1)
        (T + 1) t."""
        return (self.buckets + 1) * super().slots


def merge_and_reduce(
    eps: float,
    r: float,
    n: int,
    d: int,
    failure: float = 0.01,
    value_dim: int | None = None,
    constant: float = 30.0,
    queries: int = 1,
) -> MergeAndReduceSize:
    """Batch size and levels of MergeAndReduce, BalanceKV's Theorem 3.3: z_j, the sum of
    2^i exp(<k, q>/sqrt(d)) v over the cells C^i, is within eps j e^(-r^2/sqrt(d)) max |v| of the
    exact sum after every token j, with probability at least 1 - failure for ``queries`` queries
    fixed in advance (n: one per step).

    With rho = r^2/sqrt(d) and s = value_dim:

    - The walk (Theorem 3.4). With a = c R^2, its signed sum is sub-Gaussian; its proxy grows by
      sigma^2 <- sigma^2 + |f|^2 (1 + sigma^2 (|f|^2 - 2a)/a^2)_+, so it never exceeds the fixed
      point sigma^2 = R^2 c^2/(2c - 1) (Dwivedi and Mackey, Kernel Thinning, Theorem 3). It fails
      with probability at most 2t e^(1/2 - c) <= 2 sqrt(e) delta, as constant >= 1.
    - One call (Theorem 3.2). |u| = e^(rho/2), R = e^(rho/2) v_max; a union bound over coordinates
      gives an error of sqrt(s) kappa e^rho v_max, kappa = c/sqrt(2c-1) sqrt(2 ln(2s/beta)), with
      probability 1 - beta. (The proof runs the walk with delta/s, Algorithm 2 prints delta; with s
      in kappa it does not matter.)
    - All calls, fewer than N = 2n/t: delta = failure/(8N), beta = failure/(2N queries).
    - Levels. Keeping the smaller side biases the errors, so they add up: level i makes at most
      j/(t 2^i) calls whose errors count 2^i times, j/t per level, T j/t in all. Hence
      t = T sqrt(s) kappa e^(2 rho)/eps, solved for the smallest even t (it is also in T and N).

    Args:
        eps: > 0.
        r: bound on the norms of queries and keys, >= 0; scores are <q, k>/sqrt(d).
        n: the largest number of tokens.
        d: head_dim.
        failure: in (0, 1).
        value_dim: s, default d; 1 for the softmax normaliser, whose values are 1.
        constant: of c, >= 1; the paper has 30.
        queries: >= 1.

    Raises:
        InputError: an argument out of range, or 2 r^2/sqrt(d) > 600.
    """
    eps = number("eps", eps, "> 0", lambda x: x > 0)
    return _merge_and_reduce(eps, r, n, d, failure, value_dim, constant, queries, calls=2)


def balancekv(
    eps: float,
    r: float,
    n: int,
    d: int,
    failure: float = 0.01,
    value_dim: int | None = None,
    constant: float = 30.0,
    queries: int = 1,
    norm_ratio: float | None = None,
) -> BalanceKVSize:
    """Batch size and levels of BalanceKV, Theorem 3.1: |z - Attn|_2 <= eps |softmax|_2 |V|_F with
    probability at least 1 - failure for ``queries`` queries fixed in advance (n: one per step).

    - Each instance is ``merge_and_reduce``, with N = 4n/t calls in all: the buckets share the
      tokens, and the denominator has its own. As exp(<k,q>/sqrt(d)) >= e^-rho, an error of
      e j e^-rho is at most the share e of the denominator.
    - Buckets. Bucket i holds 2^(i-1) <= |v| <= 2^i, so its sum of norms may be half of the sum of
      the 2^i: the proof, which has 2^(i-1) as the upper end too, loses a factor 2. Numerator:
      2 T sqrt(s) kappa e^(2 rho)/t = eps/3, which is Theorem 3.3 at eps/6.
    - The denominator's error is then at most eps/6 and what line 9 erases adds at most
      eps/(2 sqrt(n)), which the proof leaves out: (1/3 + 1/6 + 1/(2 sqrt(n))) eps/(1 - eps/6) is
      at most eps where anything is sampled at all.

    Typos: Algorithm 1 line 4 means 2^(i-1) <= |v| <= 2^i, line 9 2n instead of 2^n; section 2.3
    halves log2(n/t) times, not 2^log(n/t) times; the proof's "Algorithm 2" is Algorithm 1.

    Args:
        eps: in (0, 1].
        norm_ratio: largest over smallest nonzero value norm, >= 1, where it is known: no more than
            ceil(log2(norm_ratio)) + 1 buckets are then needed. None: as many as line 9 leaves.
        others: as for ``merge_and_reduce``.

    Raises:
        InputError: an argument out of range, or 2 r^2/sqrt(d) > 600.
    """
    eps = eps_in_range(eps)
    size = _merge_and_reduce(eps / 6, r, n, d, failure, value_dim, constant, queries, calls=4)
    rho = r * r / math.sqrt(d)
    buckets = min(n, math.ceil((math.log(4 * n / eps) + rho) / math.log(2)))
    if norm_ratio is not None:
        norm_ratio = number("norm_ratio", norm_ratio, ">= 1", lambda x: x >= 1)
        buckets = min(buckets, math.ceil(math.log2(norm_ratio)) + 1)
    return BalanceKVSize(size.t, size.levels, size.delta, buckets)


def break_even(size: Callable[[int], MergeAndReduceSize]) -> int:
    """The smallest n for which ``size(n)`` requires fewer than n slots. This is a proof by
    calculation that the theorem saves nothing in shorter streams, for all n and not only a sample.

    t and the buckets never decrease as n grows. For a <= n <= b, T is at least log2(a/t(b)), so
    that there are at least (buckets(a) + 1)(T + 1) t(a) slots with that T. If this is at least b,
    no n in between saves anything. Otherwise the interval is halved, down to single n.

    Args:
        size: ``merge_and_reduce`` or ``balancekv`` as a function of n, all else fixed.
    """
    first, last = 1, 2
    while True:
        low, high = size(first), size(last)
        levels = max(1, math.ceil(math.log2(first / high.t)))
        instances = low.buckets + 1 if isinstance(low, BalanceKVSize) else 1
        if instances * (levels + 1) * low.t >= last:
            first, last = last + 1, 2 * last + 1
        elif last > first:
            last = (first + last) // 2
        elif low.slots < first:
            return first
        else:
            first, last = first + 1, 2 * first + 1


def _merge_and_reduce(
    eps: float,
    r: float,
    n: int,
    d: int,
    failure: float,
    value_dim: int | None,
    constant: float,
    queries: int,
    calls: int,
) -> MergeAndReduceSize:
    """The smallest even t with t >= T sqrt(s) kappa e^(2 rho)/eps, for N = ``calls`` n/t."""
    failure = failure_in_range(failure)
    r = number("r", r, ">= 0", lambda x: x >= 0)
    constant = number("constant", constant, ">= 1", lambda x: x >= 1)
    at_least("n", n, 1)
    at_least("d", d, 1)
    at_least("queries", queries, 1)
    s = d if value_dim is None else at_least("value_dim", value_dim, 1)
    growth = exponential("2 r^2/sqrt(d)", 2 * r * r / math.sqrt(d))

    def levels(t: int) -> int:
        return max(1, math.ceil(math.log2(n / t)))

    def delta(t: int) -> float:
        return failure / (8 * calls * max(1.0, n / t))

    def required(t: int) -> float:
        c = constant * math.log(t / delta(t))
        beta = 4 * delta(t) / queries
        kappa = c / math.sqrt(2 * c - 1) * math.sqrt(2 * math.log(2 * s / beta))
        return levels(t) * math.sqrt(s) * kappa * growth / eps

    # required() falls in t up to n and then grows like the root of a logarithm: one crossing
    low, high = 0, 1
    while 2 * high < required(2 * high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if 2 * middle >= required(2 * middle) else (middle, high)
    t = 2 * high
    return MergeAndReduceSize(t, levels(t), delta(t))
