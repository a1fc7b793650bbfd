"""The streams of the lower bounds of "Compression Barriers", and the games played on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import attend
from kvsketch.slots import Slots
from kvsketch.theory.parameters import number

# Fresh Gaussian keys drawn before coherence above eps is an error.
_DRAWS = 20


@dataclass(frozen=True)
class Recovery:
    """The bits that Bob read back.

    Attributes:
        rows: int64 ``[asked]``, the rows that he queried.
        per_row: float64 ``[asked]``, the fraction of each row's bits that he got right.
    """

    rows: Tensor
    per_row: Tensor

    @property
    def fraction(self) -> float:
        """The fraction over all queried bits. Guessing gets 1/2."""
        return float(self.per_row.mean())

    @property
    def advantage(self) -> float:
        """2 fraction - 1: what was recovered beyond guessing, 0 for a coin and 1 for the exact
        cache. A cache that keeps a quarter of the rows and drops the others gets 1/4. "Most bits"
        means an advantage near 1."""
        return 2 * self.fraction - 1


@dataclass(frozen=True)
class IndexGame:
    """INDEX as attention: Theorems 6 and 8, and 26 in its sliding-window form.

    Attributes:
        bits: Alice's x, bool ``[rows, value_dim]``.
        slots: her stream, exact tokens ``[1, 1, n, ...]``, to be compressed or fed to a sketch.
        queries: Bob's queries, ``[1, 1, rows, head_dim]``. Query i is C k_i. Scores are <q, k>, so
            that scaling=1.
        threshold: Bob answers 1 if an output is above it.
        coherence: largest ``|<k_i, k_j> - [i = j]|``. Decoding is certain if it is below eps.
    """

    bits: Tensor
    slots: Slots
    queries: Tensor
    threshold: float
    coherence: float

    def play(
        self, answer: Slots | Callable[[Tensor], Tensor], rows: Tensor | None = None
    ) -> Recovery:
        """Bob queries ``rows`` (default: all).

        He queries without inserting a token, because the (q, 0, 0) of Theorem 6 changes nothing,
        and in Theorem 26 it would push row 1 out of the window.

        Args:
            answer: slots (a compressor's output, ``sketch.slots``), or any function from queries
                ``[1, 1, q, head_dim]`` to outputs ``[1, 1, q, value_dim]``.
            rows: int64 ``[asked]``.

        Raises:
            InputError: as for ``attend``, or outputs have the wrong shape.
        """
        if isinstance(answer, Slots):
            answer = partial(attend, slots=answer, scaling=1.0)
        rows = torch.arange(self.bits.shape[0]) if rows is None else rows
        outputs = answer(self.queries[:, :, rows])
        truth = self.bits[rows]
        if outputs.shape != (1, 1, *truth.shape):
            raise InputError(
                f"answer gave outputs {tuple(outputs.shape)}, must be {(1, 1, *truth.shape)}"
            )
        right = (outputs[0, 0] > self.threshold) == truth.to(outputs.device)
        return Recovery(rows, right.double().mean(-1))


def index_game(
    bits: Tensor,
    *,
    length: int | None = None,
    eps: float = 0.1,
    eta: float = 0.0,
    d: int | None = None,
    seed: int = 0,
    strict: bool = True,
) -> IndexGame:
    """Alice's stream for ``bits``: keys k_i = f(e_i), Gaussian and nearly orthonormal; values the
    rows of bits. By Theorems 6 and 8 no o(n d)-bit memory answers Bob; by Theorem 26 no o(W d).

    With all inner products within eps and x = n e^(-C (1 - 2 eps)), Bob sees at most
    delta = x/(1 + x) for a 0 and at least Delta = 1/(1 + x) for a 1. A (1 +- eta)-approximation
    keeps them apart if x < (1 - eta)/(1 + eta). As Theorem 6 does, C is twice what that takes:
    C = 2 (ln n + ln((1 + eta)/(1 - eta)))/(1 - 2 eps). (Equation 84 halves the second logarithm,
    which is not enough: x is then the root of (1 - eta)/(1 + eta).) The threshold is the middle
    of (1 + eta) delta and (1 - eta) Delta.

    Args:
        bits: of 0 and 1, ``[rows, value_dim]``; the paper has value_dim = d.
        length: n; None: n = rows (Theorems 6, 8). Larger: Theorem 26, where n - rows tokens of key
            and value 0 come first and the window is W = rows.
        eps: in (0, 1/2); the paper has 0.1.
        eta: in [0, 1).
        d: head_dim; None: 12 ln(rows)/(eps^2 - eps^3), equation 4. (Lemma 22 loses a factor 4 in
            its union bound: 1 - 4/n, not 1 - 1/n. Coherence is therefore checked.)
        seed: of the keys.
        strict: whether keys are drawn again while the coherence is above eps, at most 20 times, and
            then refused. False: the first draw is used.

    Raises:
        InputError: an argument out of range, or d too small for eps.
    """
    if bits.dim() != 2 or 0 in bits.shape or not bool(((bits == 0) | (bits == 1)).all()):
        raise InputError(f"bits must be 0 or 1, [rows, value_dim], got {tuple(bits.shape)}")
    rows = bits.shape[0]
    n = at_least("length", rows if length is None else length, max(2, rows))
    eps = number("eps", eps, "in (0, 1/2)", lambda x: 0 < x < 0.5)
    eta = number("eta", eta, "in [0, 1)", lambda x: 0 <= x < 1)
    enough = math.ceil(12 * math.log(max(2, rows)) / (eps**2 - eps**3))
    d = enough if d is None else at_least("d", d, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_DRAWS if strict else 1):
        keys = torch.randn(rows, d, generator=generator) / math.sqrt(d)
        coherence = float((keys @ keys.T - torch.eye(rows)).abs().max())
        if coherence <= eps:
            break
    if strict and coherence > eps:
        raise InputError(
            f"d={d} is too small for {rows} keys: coherence {coherence:.3f} after {_DRAWS} draws, "
            f"must be at most eps={eps}; d={enough} is enough, strict=False takes any"
        )
    stretch = 2 * (math.log(n) + math.log((1 + eta) / (1 - eta))) / (1 - 2 * eps)
    x = n * math.exp(-stretch * (1 - 2 * eps))
    threshold = ((1 + eta) * x + (1 - eta)) / (2 * (1 + x))
    before = n - rows
    stream = Slots(
        torch.cat([torch.zeros(before, d), keys])[None, None],
        torch.cat([torch.zeros(before, bits.shape[1]), bits.float()])[None, None],
    )
    return IndexGame(bits.bool(), stream, stretch * keys[None, None], threshold, coherence)


@dataclass(frozen=True)
class NonAdaptivePair:
    """Two streams with the same query that differ in one token (Theorem 27).

    Attributes:
        query: ``[1, 1, 1, d]`` float64, for scaling=1.
        planted: H(i), ``[1, 1, n, d]``: key 1 at ``index``, 0 elsewhere.
        plain: sigma, with all keys 0 and the same values: 1, and sqrt(n) in the last sqrt(n) rows.
        planted_output: each coordinate of Attn over ``planted``.
        plain_output: each coordinate of Attn over ``plain``.
        index: i, from 0.
    """

    query: Tensor
    planted: Slots
    plain: Slots
    planted_output: float
    plain_output: float
    index: int

    @property
    def refuted_eta(self) -> float:
        """One answer is within (1 +- eta) of both outputs if and only if eta is at least this.
        Below 1/3 for i <= n - sqrt(n): the paper's "factor 2 > 1 + eta" refutes an algorithm that
        answers alike only if the outputs differ by (1 + eta)/(1 - eta), and 2 is never reached."""
        low, high = sorted((self.planted_output, self.plain_output))
        return (high - low) / (high + low)

    def told_apart(self, positions: Tensor) -> bool:
        """Whether the tokens at ``positions`` (int64, any number) differ between the streams."""
        seen = [
            torch.cat([s.keys[0, 0, positions], s.values[0, 0, positions]], dim=-1)
            for s in (self.planted, self.plain)
        ]
        return not torch.equal(*seen)


def non_adaptive_pair(n: int, d: int, i: int) -> NonAdaptivePair:
    """H(i) and sigma of Theorem 27 (sqrt(n) is rounded down if n is not a square).

    Differences to the text: equation 90's rows are n - sqrt(n) + 1 .. n; the query of equation 87
    serves both streams (92 has another for sigma, where all keys are 0 and it does not matter).

    Args:
        n: tokens, >= 4.
        d: head_dim and value_dim.
        i: in 0 .. n - 1.

    Raises:
        InputError: an argument out of range.
    """
    at_least("n", n, 4)
    at_least("d", d, 1)
    if not 0 <= at_least("i", i, 0) < n:
        raise InputError(f"i={i!r} must be an int in 0 .. {n - 1}")
    few = math.isqrt(n)
    values = torch.ones(1, 1, n, d, dtype=torch.float64)
    values[:, :, n - few :] = math.sqrt(n)
    keys = torch.zeros_like(values)
    planted = keys.clone()
    planted[:, :, i] = 1.0
    query = torch.full((1, 1, 1, d), 2 / d * math.log(n - 1), dtype=torch.float64)
    total = n - few + few * math.sqrt(n)
    mine = math.sqrt(n) if i >= n - few else 1.0
    return NonAdaptivePair(
        query,
        Slots(planted, values),
        Slots(keys, values),
        (1 - 1 / n) * mine + (total - mine) / (n * (n - 1)),  # equation 97
        total / n,  # equation 96
        i,
    )


def detection_rate(
    read: Callable[[torch.Generator], Tensor], n: int, d: int, trials: int = 100, seed: int = 0
) -> float:
    """How often a non-adaptive reader distinguishes H(i) from sigma for uniformly random i. This is
    reads/n, so that o(n) reads see no difference with probability 1 - o(1) (the paper's
    1 - 1/poly(n) is too strong).

    Args:
        read: returns the positions that it reads, int64, before it sees any data. It takes its
            random numbers from the generator.
        n: tokens.
        d: head_dim and value_dim.
        trials: >= 1, each with a new i and a new choice of positions.
        seed: of i and of the generator.

    Raises:
        InputError: an argument out of range.
    """
    generator = torch.Generator().manual_seed(seed)
    caught = 0
    for _ in range(at_least("trials", trials, 1)):
        positions = read(generator)
        i = int(torch.randint(n, (1,), generator=generator))
        caught += non_adaptive_pair(n, d, i).told_apart(positions)
    return caught / trials
