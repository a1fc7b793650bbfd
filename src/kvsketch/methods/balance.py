"""Signs that keep a signed sum small: the loop of all balancing methods, and the self-balancing
walk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError

# Inner products with earlier vectors are computed in panels, at most so many at once (64 MB).
_PANEL = 64
_HELD = 1 << 24

#: (inner product with the signed sum so far, squared norm, step) -> sign +1 or -1, all ``[R]``
Decide = Callable[[Tensor, Tensor, int], Tensor]


class Vectors(ABC):
    """R sequences of n vectors, of which only the inner products are needed."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """R and n, the numbers of sequences and of vectors of each."""

    @abstractmethod
    def inner(self, first: slice, second: slice) -> Tensor:
        """Inner products of two ranges of every sequence, ``[R, len(first), len(second)]``."""


@dataclass(frozen=True)
class Plain(Vectors):
    """Vectors that are given explicitly, ``[R, n, d]``."""

    vectors: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.vectors.shape[0], self.vectors.shape[1]

    def inner(self, first: slice, second: slice) -> Tensor:
        return self.vectors[:, first] @ self.vectors[:, second].transpose(1, 2)


@dataclass(frozen=True)
class Lifted(Vectors):
    """phi(k) (x) u with <phi(k), phi(k')> = exp(scaling <k, k'> - shift): the embedding in the
    proof of BalanceKV's Theorem 3.2, divided by exp(shift / 2) so that nothing overflows.

    Attributes:
        keys: ``[R, n, d]``, float32 or float64.
        values: ``[R, n, s]``.
        scaling: of the scores; 1/sqrt(d) in the paper.
        shift: ``[R]``.
        groups: ``[R, n]``. Vectors of different groups are orthogonal, so that every group is
            balanced separately. None: one group.
    """

    keys: Tensor
    values: Tensor
    scaling: float
    shift: Tensor
    groups: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.keys.shape[0], self.keys.shape[1]

    def inner(self, first: slice, second: slice) -> Tensor:
        keys, others = self.keys[:, first], self.keys[:, second].transpose(1, 2)
        shift = self.shift[:, None, None].to(keys.dtype)
        exponent = torch.baddbmm(-shift, keys, others, alpha=self.scaling)
        # Keys beyond the given radius (a recorded failure) must not become infinite.
        products = self.values[:, first] @ self.values[:, second].transpose(1, 2)
        found = exponent.clamp_(max=60.0).exp_().mul_(products)
        if self.groups is None:
            return found
        return found.mul_(self.groups[:, first].unsqueeze(2) == self.groups[:, second].unsqueeze(1))


def balance(vectors: Vectors, decide: Decide) -> Tensor:
    """Signs for vectors in order. Each is decided from the inner product of its vector with the
    signed sum of the vectors before it. Takes O(R n^2) inner products and O(R n) memory.

    Returns:
        ``[R, n]`` of +1 and -1.
    """
    signs: list[Tensor] = []
    rows, count = vectors.size
    for start in range(0, count, _PANEL):
        panel = slice(start, min(start + _PANEL, count))
        width = panel.stop - panel.start
        within = vectors.inner(panel, panel)
        pending = torch.zeros_like(within[..., 0])
        step = max(1, _HELD // max(1, rows * width))
        if signs:
            past = torch.cat(signs, dim=1)
            for begin in range(0, start, step):
                part = slice(begin, min(begin + step, start))
                products = vectors.inner(panel, part)
                pending += (products @ past[:, part].unsqueeze(-1)).squeeze(-1)
        chosen = torch.empty_like(pending)
        norms = within.diagonal(dim1=1, dim2=2)
        for i in range(width):
            sign = decide(pending[:, i], norms[:, i], start + i)
            chosen[:, i] = sign
            pending.addcmul_(within[:, i], sign.unsqueeze(1))
        signs.append(chosen)
    return torch.cat(signs, dim=1)


def walk_threshold(count: int, delta: float, constant: float = 30.0) -> float:
    """c = constant log(n / delta), Algorithm 4 line 2 (natural logarithm).

    Raises:
        InputError: delta not in (0, 1) or constant <= 0.
    """
    if not 0 < delta < 1:
        raise InputError(f"delta={delta!r} must lie in (0, 1) (a probability of failure)")
    if not (math.isfinite(constant) and constant > 0):
        raise InputError(f"constant={constant!r} must be a finite number > 0 (the paper has 30)")
    return constant * math.log(max(count, 1) / delta)


def walk(
    vectors: Vectors, threshold: float, bound: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """The self-balancing walk: sign +1 with probability 1/2 - <w, v>/(2 c R^2).

    Args:
        threshold: c.
        bound: R^2 per sequence, ``[R]``, or per vector, ``[R, n]``: that of its group.
        uniform: random numbers in [0, 1), ``[R, n]``.

    Returns:
        Signs ``[R, n]`` and failed, bool ``[R]``: whether |<w, v>| exceeded c R^2 somewhere (line
        6). The probability is then clamped to 0 or 1, and the walk continues.
    """
    limit = (threshold * bound).clamp(min=torch.finfo(bound.dtype).tiny)
    rows, count = vectors.size
    failed = torch.zeros(rows, dtype=torch.bool, device=bound.device)
    limits = limit.unsqueeze(1).expand(-1, count) if limit.dim() == 1 else limit

    def decide(pending: Tensor, norm: Tensor, step: int) -> Tensor:
        limit = limits[:, step]
        failed.logical_or_(pending.abs() > limit)
        up = uniform[:, step] < 0.5 - pending / (2 * limit)
        return torch.where(up, 1.0, -1.0).to(pending.dtype)

    return balance(vectors, decide), failed


def self_balancing_walk(
    vectors: Tensor,
    radius: float,
    delta: float,
    *,
    constant: float = 30.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Self-Balancing Walk (Alweiss, Liu and Sawhney 2021; BalanceKV Algorithm 4).

    Args:
        vectors: ``[R, n, d]``, R independent sequences.
        radius: r, an upper bound of all norms.
        delta: probability of failure.
        constant: of c = constant log(n/delta); 30 in the paper.

    Returns:
        Signs ``[R, n]`` (+1: in U+) and failed, bool ``[R]`` (line 6). The output in the paper is
        the smaller of U+ and U-.

    Raises:
        InputError: a norm above ``radius``, or delta or constant out of range.
    """
    threshold = walk_threshold(vectors.shape[1], delta, constant)
    largest = float(vectors.norm(dim=-1).max()) if vectors.numel() else 0.0
    if largest > radius * (1 + 1e-6):
        raise InputError(f"radius={radius!r} is below the largest norm {largest:.6g}")
    bound = vectors.new_full((vectors.shape[0],), radius**2)
    uniform = torch.rand(vectors.shape[:2], generator=generator, dtype=torch.float64, device="cpu")
    return walk(Plain(vectors), threshold, bound, uniform.to(vectors.device))
