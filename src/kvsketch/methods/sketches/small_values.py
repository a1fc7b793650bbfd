"""Value-norm buckets and which of them are too small to matter (BalanceKV Algorithm 1, line 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.slots import Slots


def norm_bucket(values: Tensor) -> Tensor:
    """i with 2^(i-1) <= ``|v|`` < 2^i, int64 ``[batch, heads, q]`` (line 4 has the two sides
    exchanged); 0 where v is 0, which is in no bucket."""
    return torch.frexp(values.double().norm(dim=-1)).exponent.long()


@dataclass(frozen=True)
class Erased:
    """Line 9: buckets with 2^i <= eps/(2n) e^(-r^2/sqrt(d)) v_max are erased, v_max being the
    largest norm so far (the paper prints 2^n; the proof of Theorem 3.1 needs 2n).

    The rule is about buckets, not tokens, and holds after every token: a bucket that was too small
    at some token is empty of everything up to that token, however the stream is cut into chunks.
    With r=None, r is the largest key norm so far, so that a bucket erased once may fill again.

    Attributes:
        r: bound on the norms of keys and queries, or None.
        eps: precision, in (0, 1].
        max_tokens: n.
        scaling: of the scores; None: 1/sqrt(head_dim).

    Raises:
        InputError: eps or max_tokens out of range.
    """

    r: float | None
    eps: float
    max_tokens: int
    scaling: float | None

    def __post_init__(self) -> None:
        if not 0 < self.eps <= 1:
            raise InputError(f"eps={self.eps!r} must lie in (0, 1]")
        at_least("max_tokens", self.max_tokens, 1)

    def begin(self, state: dict[str, Tensor], new: Slots) -> None:
        """Nothing seen yet: the largest norms, and ``beyond``, how many keys were beyond r."""
        shape, device = new.keys.shape[:2], new.keys.device
        for name in ("v_max", "k_max"):
            state[name] = torch.zeros(shape, dtype=torch.float64, device=device)
        state["beyond"] = torch.zeros(shape, dtype=torch.int64, device=device)

    def update(
        self, state: dict[str, Tensor], new: Slots, there: Tensor, refuse: bool
    ) -> tuple[Tensor, Tensor]:
        """Record new tokens.

        Args:
            there: bool ``[batch, heads, q]``, which of them exist.
            refuse: whether a key beyond r is an error.

        Returns:
            Which tokens are in a bucket that is not erased by the end of them (bool ``[batch,
            heads, q]``), and a bound (float64 ``[batch, heads]``): buckets with 2^i at most that
            lose all they held before.

        Raises:
            InputError: a key beyond r, if that is to be refused.
        """
        norms = new.values.double().norm(dim=-1) * there
        key_norms = new.keys.double().norm(dim=-1) * there
        beyond = key_norms > (math.inf if self.r is None else self.r * (1 + 1e-6))
        if refuse and bool(beyond.any()):
            raise InputError(
                f"a key has norm {float(key_norms.max()):.6g}, beyond r={self.r}; sketch unchanged"
            )
        largest = _running(state["v_max"], norms)
        longest = _running(state["k_max"], key_norms)
        limit = self._limit(longest, largest, new.keys.shape[3])
        # What is erased at a token is what came up to it: the largest limit from there on decides.
        later = limit.flip(-1).cummax(-1).values.flip(-1)
        kept = (norms > 0) & (torch.exp2(torch.frexp(norms).exponent.double()) > later)
        state["v_max"], state["k_max"] = largest[..., -1].clone(), longest[..., -1].clone()
        state["beyond"] = state["beyond"] + beyond.sum(-1)
        return kept, later[..., 0]

    def merge(self, state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        """Record all that another sketch saw."""
        for name in ("v_max", "k_max"):
            state[name] = torch.maximum(state[name], other[name])
        state["beyond"] = state["beyond"] + other["beyond"]

    def now(self, state: dict[str, Tensor], head_dim: int) -> Tensor:
        """The bound of line 9 as it is now, float64 ``[batch, heads]``."""
        return self._limit(state["k_max"], state["v_max"], head_dim)

    def _limit(self, key_norm: Tensor, value_norm: Tensor, head_dim: int) -> Tensor:
        scaling = head_dim**-0.5 if self.scaling is None else self.scaling
        r = key_norm if self.r is None else torch.full_like(key_norm, self.r)
        return self.eps / (2 * self.max_tokens) * torch.exp(-scaling * r.square()) * value_norm


def _running(before: Tensor, norms: Tensor) -> Tensor:
    """The largest norm so far at every token, ``[batch, heads, q]``."""
    return torch.maximum(before.unsqueeze(-1), norms.cummax(-1).values)
