"""BalanceKV within a number of slots: one list of slots for all instances."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods import SoftmaxBalance
from kvsketch.methods.sketches.base import Sketch
from kvsketch.methods.sketches.bounded import Bounded, packed
from kvsketch.methods.sketches.small_values import Erased, norm_bucket
from kvsketch.random_numbers import derived, uniform
from kvsketch.slots import Slots

# Batches smaller than this choose the same slots for numerator and denominator.
_APART = 16


def balance_of(
    r: float | None,
    max_tokens: int,
    delta: float | None,
    constant: float,
    on_fail: str,
    scaling: float | None,
) -> SoftmaxBalance:
    """What balances a batch of every instance of Algorithm 1. ``delta`` None: 1/n^2, a
    1/poly(n)."""
    return SoftmaxBalance(
        scaling=scaling,
        r_key=r,
        delta=1 / max(2, max_tokens) ** 2 if delta is None else delta,
        constant=constant,
        on_fail=on_fail,
    )


class BalanceKVBounded(Bounded):
    """BalanceKV Algorithm 1 within a budget. Ours; this is ``balancekv_streaming`` in a cache.

    As in Algorithm 1, the denominator's instance balances (k, 1), one instance per value-norm
    bucket balances (k, v), and small buckets are erased. There, every instance has its own batches,
    so a token that the numerator keeps at level 2 may be dropped from the denominator or count once
    in it; if few tokens get most of the attention, the quotient can then be wrong by any factor.
    Here all instances cut their batches at the same places (``Bounded``), the walks use the same
    random numbers, and where exactly half is to be kept ("chosen at random" in section 4) the
    denominator prefers what the numerator kept. So the instances keep nearly the same tokens, at
    the same weights, and such a token is held once: a slot (k, a v, m) with a weight a in its
    bucket's instance and a weight m in the denominator's. Batches of fewer than 16 slots keep the
    same slots in both.

    As in section 4, exactly half of a batch is kept: half of the numerator's slots, all buckets
    together, which then count double (of an odd number one more or less, at random), and half of
    the denominator's, rounded up, which share the batch's mass, so that the mass is the number of
    tokens at any time. No bound is claimed: a bucket's part of a batch may be small.

    Args:
        capacity: largest number of slots per KV head, >= 2.
        batch_size: t, see ``Bounded``.
        r, eps, max_tokens, delta, constant, on_fail, scaling: as for ``BalanceKVStreaming``.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range.
    """

    name = "balancekv_bounded"
    paper = "ours, after Han et al., BalanceKV Algorithm 1 (2502.07861)"
    columns = 2

    def __init__(
        self,
        capacity: int,
        batch_size: int | None = None,
        r: float | None = None,
        eps: float = 0.1,
        max_tokens: int = 1 << 20,
        delta: float | None = None,
        constant: float = 30.0,
        on_fail: str = "record",
        scaling: float | None = None,
        seed: int = 0,
    ) -> None:
        self._erased = Erased(r, eps, max_tokens, scaling)
        self.r, self.eps, self.max_tokens, self.scaling = r, eps, max_tokens, scaling
        self.delta, self.constant, self.on_fail = delta, constant, on_fail
        self._balance = balance_of(r, max_tokens, delta, constant, on_fail, scaling)
        super().__init__(capacity, batch_size, seed)

    @property
    def failures(self) -> Tensor:
        """Failed walks, and keys beyond r, int64 ``[batch, heads]``."""
        return super().failures + self.state["beyond"]

    def most_bytes(self, token: Slots) -> int:
        return super().most_bytes(token) + 24

    def _begin(self, new: Slots) -> None:
        super()._begin(new)
        self._erased.begin(self.state, new)

    def _weigh(self, new: Slots, there: Tensor) -> Tensor:
        bucketed, gone = self._erased.update(self.state, new, there, self.on_fail == "raise")
        self._erase(gone)
        return torch.stack([bucketed, there], dim=-1).float()

    def _erase(self, below: Tensor) -> None:
        """Line 9: erase the buckets with 2^i <= ``below``, ``[batch, heads]``."""
        held, weights = self.get("held"), self._live_weights()
        gone = torch.exp2(norm_bucket(held.values).double()) <= below.unsqueeze(-1)
        if not bool((gone & (weights[..., 0] > 0)).any()):
            return
        weights = weights * ~(gone.unsqueeze(-1) & torch.tensor([True, False], device=gone.device))
        held, weights, fill = packed(held, weights, self.state["fill"])
        self.put("held", held)
        self.state["weights"], self.state["fill"] = weights, fill

    def _merge(self, other: Sketch) -> None:
        self._erased.merge(self.state, other.state)
        super()._merge(other)
        self._erase(self._erased.now(self.state, self.meta["token"]["head_dim"]))

    def _halve(self, batch: Slots, weights: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        above, below = weights.unbind(-1)
        members = above > 0
        bucket = norm_bucket(batch.values)
        bucket = (bucket - bucket.amin()).masked_fill(~members, int(bucket.amax() - bucket.amin()))
        values = batch.values * above.unsqueeze(-1).to(batch.values.dtype)
        # The same random numbers, so that both walks prefer the same tokens.
        numerator, failed = self._balance.signs(Slots(batch.keys, values, above), streams, bucket)
        ones = Slots(batch.keys, batch.values[..., :0], below)
        denominator, failed_too = self._balance.signs(ones, streams)
        tie = uniform(derived(streams, -1), below.shape[-1])
        coin = uniform(derived(streams, -2), 1) < 0.5
        there = (weights > 0).any(-1)
        small = there.sum(-1, keepdim=True) < _APART
        above_kept = _half(members, 1.0 * (numerator < 0) + tie, coin)
        more = torch.ones_like(coin)
        below_kept = _half(below > 0, 2.0 * (denominator < 0) + ~above_kept + tie, more)
        both = _half(there, 1.0 * (denominator < 0) + tie, coin)
        small = small & (both & (below > 0)).any(-1, keepdim=True)
        above = 2 * above * torch.where(small, both, above_kept)
        kept = below * torch.where(small, both, below_kept)
        total, rest = below.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
        # Of an odd number of slots it is not half that is kept: the mass stays what it was.
        below = kept * torch.where(rest > 0, total / rest.clamp(min=1e-30), 1.0)
        return torch.stack([above, below], dim=-1), (failed | failed_too).long()

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        held, weights = self.get("held"), self._live_weights()
        above, below = weights.unbind(-1)
        values = held.values * above.unsqueeze(-1).to(held.values.dtype)
        return Slots(held.keys, values, below, held.positions)


def _half(members: Tensor, order: Tensor, coin: Tensor) -> Tensor:
    """Half of the members, those of least ``order``; of an odd number one more where ``coin``
    (``[..., 1]``) says so. bool ``[..., n]``."""
    rank = order.masked_fill(~members, torch.inf).argsort(-1).argsort(-1)
    count = members.sum(-1, keepdim=True)
    return members & (rank < count // 2 + (count % 2) * coin)
