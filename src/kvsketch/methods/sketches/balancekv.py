"""BalanceKV Algorithm 1: value-norm buckets, numerator and denominator in separate instances."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.sketches.balancekv_bounded import BalanceKVBounded, balance_of
from kvsketch.methods.sketches.base import Sketch
from kvsketch.methods.sketches.bounded import even
from kvsketch.methods.sketches.levels import Levels
from kvsketch.methods.sketches.small_values import Erased, norm_bucket
from kvsketch.random_numbers import derived
from kvsketch.slots import Slots


class BalanceKVStreaming(Sketch):
    """BalanceKV, Algorithm 1 as written.

    Tokens are put into buckets by value norm, bucket i with 2^(i-1) <= |v| < 2^i (line 4 exchanges
    the two sides); each bucket is a MergeAndReduce instance over SoftmaxBalance on (k, v), whose
    tokens become slots (k, 2^l v, 0). One more instance, on (k, 1), gives the slots (k, 0, 2^l).
    Buckets with 2^i <= eps/(2n) e^(-r^2/sqrt(d)) v_max are erased (line 9 prints 2^n; the proof of
    Theorem 3.1 needs 2n). Values of norm 0 are in no bucket, only in the denominator.

    The number of slots depends on the stream. Within a budget, and therefore in a cache, the
    algorithm runs as ``BalanceKVBounded``, whose docstring lists the differences.

    Bound (Theorem 3.1), with ``kvsketch.theory.balancekv`` for the batch size: error at most
    eps |softmax(Kq)|_2 |V|_F, in O*(d t log(n/t)) memory per bucket.

    Args:
        r: bound on the norms of keys and queries; None: the largest key norm so far, which suits
            real models (their norms have no useful a-priori bound).
        batch_size: t, an even number >= 2.
        levels: T; None: log2(n/t), as many as needed.
        eps: precision, in (0, 1]; only determines which buckets are erased.
        max_tokens: n, the largest length of the stream; determines which buckets are erased, and
            the walk's delta.
        delta: failure probability of one SoftmaxBalance; None: 1/n^2, a 1/poly(n).
        constant: of the walk, c = constant log(t/delta); 30 in the paper.
        on_fail: "record": norms beyond r and failed walks are counted in ``failures``; "raise":
            InputError, and the sketch is unchanged.
        scaling: of the scores, default 1/sqrt(head_dim).
        seed: of every random choice.

    Raises:
        InputError: an argument out of range.
    """

    name = "balancekv_streaming"
    paper = "Han et al., BalanceKV Algorithm 1 (2502.07861)"
    guarantee = (
        "Theorem 3.1, at the batch size that kvsketch.theory.balancekv calculates: error at most "
        "eps |softmax(Kq)|_2 |V|_F; within a budget: unbiased numerator and denominator"
    )
    least_slots = BalanceKVBounded.least_slots

    def __init__(
        self,
        r: float | None = None,
        batch_size: int = 256,
        levels: int | None = None,
        eps: float = 0.1,
        max_tokens: int = 1 << 20,
        delta: float | None = None,
        constant: float = 30.0,
        on_fail: str = "record",
        scaling: float | None = None,
        seed: int = 0,
    ) -> None:
        self._erased = Erased(r, eps, max_tokens, scaling)
        self.r, self.eps = r, eps
        self.batch_size = even("batch_size", batch_size)
        self.levels = levels if levels is None else at_least("levels", levels, 1)
        self.max_tokens, self.delta = max_tokens, delta
        self.constant, self.on_fail, self.scaling = constant, on_fail, scaling
        self._balance = balance_of(r, max_tokens, delta, constant, on_fail, scaling)
        super().__init__(seed)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> BalanceKVBounded:
        """``BalanceKVBounded`` with at most ``slots`` slots, at every length of the stream."""
        return BalanceKVBounded.for_budget(slots, seed, **options)

    @property
    def failures(self) -> Tensor:
        """Failed SoftmaxBalance calls, all instances together, int64 ``[batch, heads]``."""
        self._require_tokens()
        total = self._levels("denominator").failed
        if self.buckets:
            total = total + self._split(self._levels("numerator").failed).sum(-1)
        return total + self.state["beyond"]

    @property
    def buckets(self) -> int:
        """Numerator instances per head."""
        return int(self.meta.get("buckets", 0))

    def _levels(self, prefix: str) -> Levels:
        careful = self.on_fail == "raise"
        return Levels(self, prefix, self._balance, self.batch_size, self.levels, careful)

    def _split(self, tensor: Tensor) -> Tensor:
        """``[batch, heads * buckets, ...]`` to ``[batch, heads, buckets, ...]``."""
        batch, streams, *rest = tensor.shape
        return tensor.reshape(batch, streams // self.buckets, self.buckets, *rest)

    def _spread(self, new: Slots) -> Slots:
        """The same tokens for every bucket, ``[batch, heads * buckets, ...]``."""
        return new.map(lambda t: t.repeat_interleave(self.buckets, dim=1))

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        there = torch.ones_like(new.keys[..., 0]).bool() if live is None else live
        denominator = self._levels("denominator")
        if not denominator.depth:
            self._erased.begin(self.state, new)
            denominator.start(_ones(new))
        bucketed, below = self._erased.update(self.state, new, there, self.on_fail == "raise")
        self._erase(below)
        keys = self.streams()
        number = norm_bucket(new.values)
        if bool(bucketed.any()):
            lowest, highest = int(number[bucketed].min()), int(number[bucketed].max())
            if self.buckets:
                self._cover(lowest, highest)
            else:
                self.meta["lowest"], self.meta["buckets"] = lowest, highest - lowest + 1
                self._levels("numerator").start(self._spread(new.narrow(0, 1)))
            index = torch.arange(self.buckets, device=number.device) + self.meta["lowest"]
            mine = (number.unsqueeze(2) == index.view(1, 1, -1, 1)) & bucketed.unsqueeze(2)
            self._levels("numerator").push(
                0, self._spread(new), mine.flatten(1, 2), self._bucket_keys(keys)
            )
        denominator.push(0, _ones(new), there, self.streams())

    def _bucket_keys(self, keys: Tensor) -> Tensor:
        """Random streams of the buckets, ``[batch, heads * buckets]``: those of a bucket depend on
        its own number, not on which others there are."""
        number = torch.arange(self.buckets, device=keys.device) + self.meta["lowest"]
        return derived(keys.unsqueeze(-1), number).flatten(1)

    def _erase(self, below: Tensor) -> None:
        """Line 9: buckets with 2^i <= ``below`` (``[batch, heads]``) are emptied; what no head
        needs any more is given back."""
        if not self.buckets:
            return
        index = torch.arange(self.buckets, device=below.device) + self.meta["lowest"]
        gone = torch.exp2(index.double()) <= below.unsqueeze(-1)
        if not bool(gone.any()):
            return
        levels = self._levels("numerator")
        levels.erase(gone.flatten(1, 2))
        unneeded = int(gone.all(0).all(0).long().cumprod(0).sum())
        if 0 < unneeded < self.buckets:
            failed = self._split(levels.failed)[:, :, :unneeded].sum(-1)
            self.state["beyond"] = self.state["beyond"] + failed  # failures are never forgotten
            levels.map_streams(lambda t: self._split(t)[:, :, unneeded:].flatten(1, 2))
            self.meta["buckets"] = self.buckets - unneeded
            self.meta["lowest"] = self.meta["lowest"] + unneeded

    def _cover(self, lowest: int, highest: int) -> None:
        """Make room for the buckets from ``lowest`` to ``highest`` beside those there are."""
        below = max(0, self.meta["lowest"] - lowest)
        above = max(0, highest - (self.meta["lowest"] + self.buckets - 1))

        def widened(tensor: Tensor) -> Tensor:
            split = self._split(tensor)
            left = split.new_zeros(*split.shape[:2], below, *split.shape[3:])
            right = split.new_zeros(*split.shape[:2], above, *split.shape[3:])
            return torch.cat([left, split, right], dim=2).flatten(1, 2)

        if below or above:
            self._levels("numerator").map_streams(widened)
            self.meta["buckets"] = self.buckets + below + above
            self.meta["lowest"] = self.meta["lowest"] - below

    def _merge(self, other: BalanceKVStreaming) -> None:
        self._erased.merge(self.state, other.state)
        keys = self.streams()
        if other.buckets and not self.buckets:
            for name, tensor in other.state.items():
                if name.startswith("numerator"):
                    self.state[name] = tensor.clone()
            for name in ("lowest", "buckets", "numerator.depth"):
                self.meta[name] = other.meta[name]
        elif other.buckets:
            other = copy.deepcopy(other)
            self._cover(other.meta["lowest"], other.meta["lowest"] + other.buckets - 1)
            other._cover(self.meta["lowest"], self.meta["lowest"] + self.buckets - 1)
            self._levels("numerator").absorb(other._levels("numerator"), self._bucket_keys(keys))
        self._levels("denominator").absorb(other._levels("denominator"), self.streams())
        self._erase(self._erased.now(self.state, self.meta["token"]["head_dim"]))

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        below = self._levels("denominator").slots()
        width = self.meta["token"]["value_dim"]
        ones = below.values.new_zeros(*below.values.shape[:3], width)
        denominator = Slots(below.keys, ones, below.mass, below.positions)
        if not self.buckets:
            return denominator
        above = self._levels("numerator").slots().map(lambda t: self._split(t).flatten(2, 3))
        numerator = Slots(
            above.keys, above.values, torch.zeros_like(above.masses()), above.positions
        )
        return Slots.cat([_packed(numerator), denominator])


def _packed(slots: Slots) -> Slots:
    """Live slots first, cut to what the fullest head has: buckets are of different size."""
    live = slots.live()
    if live is None:
        live = (slots.values != 0).any(-1)
    order = live.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return slots.take(order[..., : int(live.sum(-1).max())])


def _ones(new: Slots) -> Slots:
    """(k, 1): a value of width 0, so that SoftmaxBalance balances the mass."""
    return Slots(new.keys, new.values[..., :0], positions=new.positions)
