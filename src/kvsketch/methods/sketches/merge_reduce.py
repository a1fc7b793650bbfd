"""MergeAndReduce (BalanceKV Algorithm 3) around any halving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.methods import HALVINGS, Halving
from kvsketch.methods.sketches.base import Sketch
from kvsketch.methods.sketches.bounded import Bounded, even
from kvsketch.methods.sketches.levels import Levels
from kvsketch.slots import Slots


class MergeReduceBounded(Bounded):
    """MergeAndReduce within a budget: the same slots serve numerator and denominator, any halving
    halves batches when space is needed (see ``Bounded``). This is ``merge_reduce`` in a cache.

    Args:
        capacity: largest number of slots per KV head, >= 2.
        halving: name of the halving.
        batch_size: t, see ``Bounded``.
        options: further arguments of the halving.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range, an unknown halving or option.
    """

    name = "merge_reduce_bounded"
    paper = "ours, after Han et al., BalanceKV Algorithm 3 (2502.07861)"

    def __init__(
        self,
        capacity: int,
        halving: str = "greedy_halving",
        batch_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.halving, self.options = halving, dict(options or {})
        self._halving = _halving(halving, self.options)
        super().__init__(capacity, batch_size, seed)

    def _weigh(self, new: Slots, there: Tensor) -> Tensor:
        return there.unsqueeze(-1).float()

    def _halve(self, batch: Slots, weights: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        weight = weights[..., 0]
        sums = batch.values * weight.unsqueeze(-1).to(batch.values.dtype)
        half = self._halving.half(Slots(batch.keys, sums, weight), streams)
        kept = torch.zeros_like(weight).scatter(2, half.index, half.real.to(weight.dtype))
        # The smaller side of a walk may be empty: the batch is then halved again.
        kept = torch.where((weight * kept).sum(-1, keepdim=True) > 0, kept, 1.0)
        share = (weight * kept).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        return (weight * kept / share.clamp(min=1e-30)).unsqueeze(-1), half.failed.long()

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        return self.get("held").scaled(self._live_weights()[..., 0])


class MergeReduce(Sketch):
    """MergeAndReduce, Algorithm 3 of BalanceKV, with any halving (balancekv, kernel_halving, ...).

    Tokens are collected in batches of ``batch_size``. A full batch is halved and its half joins the
    next level, where a token has twice the mass. There is at most one batch per level: O(d t
    log(n/t)) memory. The same tokens serve numerator and denominator; BalanceKV with a separate
    instance for each is ``BalanceKVStreaming``. (Line 6 reads "if p is not a multiple of t"; j is
    meant.)

    With ``softmax_balance``, which keeps the smaller side, the mass falls short of the tokens at
    every level, most with small batches; all other halvings keep it, and so does
    ``MergeReduceBounded`` with any. The number of slots depends on the stream: within a budget, and
    therefore in a cache, the algorithm runs as ``MergeReduceBounded``.

    Args:
        halving: name of the halving.
        batch_size: t, an even number >= 2.
        levels: T, the largest number of halvings of a token; the last level then grows as n / 2^T.
            None: as many as the stream needs, which is T = log2(n/t), the theorem's choice.
        options: further arguments of the halving.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range, an unknown halving or option.
    """

    name = "merge_reduce"
    paper = "Han et al., BalanceKV Algorithm 3 (2502.07861)"
    guarantee = "Theorem 3.3, with halving='softmax_balance' at the theorem's batch size"
    least_slots = MergeReduceBounded.least_slots

    def __init__(
        self,
        halving: str = "greedy_halving",
        batch_size: int = 256,
        levels: int | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.halving = halving
        self.batch_size = even("batch_size", batch_size)
        self.levels = levels if levels is None else at_least("levels", levels, 1)
        self.options = dict(options or {})
        self._halving = _halving(halving, self.options)
        super().__init__(seed)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> MergeReduceBounded:
        """``MergeReduceBounded`` with at most ``slots`` slots, at every length of the stream."""
        return MergeReduceBounded.for_budget(slots, seed, **options)

    @property
    def failures(self) -> Tensor:
        """Halvings that failed (the walk's FAIL), int64 ``[batch, heads]``."""
        self._require_tokens()
        return self._levels().failed

    def _levels(self) -> Levels:
        careful = self.options.get("on_fail") == "raise"
        return Levels(self, "level", self._halving, self.batch_size, self.levels, careful)

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        levels = self._levels()
        if not levels.depth:
            levels.start(new)
        there = torch.ones_like(new.keys[..., 0]).bool() if live is None else live
        levels.push(0, new, there, self.streams())

    def _merge(self, other: MergeReduce) -> None:
        self._levels().absorb(other._levels(), self.streams())

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        return self._levels().slots()


def _halving(name: str, options: Mapping[str, Any]) -> Halving:
    if name not in HALVINGS:
        raise unknown_name("halving", name, HALVINGS)
    try:
        return HALVINGS[name](**options)
    except TypeError as error:
        raise InputError(f"options={options!r} do not fit {name}: {error}") from None
