"""MergeAndReduce (BalanceKV Algorithm 3) around any halving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..compressors import HALVINGS
from ..errors import InputError, at_least, unknown_name
from ..slots import Slots
from .base import Sketch, merged_options
from .levels import Levels


class MergeReduce(Sketch):
    """MergeAndReduce, Algorithm 3 of BalanceKV, as a driver of any halving in
    ``kvsketch.compressors.HALVINGS``.

    Tokens gather in batches of ``batch_size``; a full batch is halved and its half joins the next
    level, where a token stands for twice as many. At most one batch per level is held:
    O(d t log(n/t)) memory. The same tokens serve numerator and denominator; BalanceKV with a
    separate instance for each is ``BalanceKVStreaming``. (Line 6 reads "if p is not a multiple of
    t"; j is meant.)

    Args:
        halving: name of the halving.
        batch_size: t, an even number >= 2.
        levels: T, halvings a token goes through at most; the last level then grows as n / 2^T.
            None: as many as the stream needs, which is T = log2(n/t), the theorem's choice.
        options: further arguments of the halving.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range, an unknown halving or option.
    """

    name = "merge_reduce"
    paper = "Han et al., BalanceKV Algorithm 3 (2502.07861)"
    parameters = ("halving", "batch_size", "levels", "options")

    def __init__(
        self,
        halving: str = "greedy_halving",
        batch_size: int = 256,
        levels: int | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if halving not in HALVINGS:
            raise unknown_name("halving", halving, HALVINGS)
        self.halving = halving
        self.batch_size = even("batch_size", batch_size)
        self.levels = levels if levels is None else at_least("levels", levels, 1)
        self.options = dict(options or {})
        try:
            self._halving = HALVINGS[halving](**self.options)
        except TypeError as error:
            raise InputError(f"options={self.options!r} do not fit {halving}: {error}") from None
        super().__init__(seed)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> MergeReduce:
        """The batch size with which 2^20 tokens take at most ``slots`` slots at any time; a longer
        stream takes half a batch more per doubling."""
        size = options.pop("batch_size", None) or batch_for(slots)
        return cls(**merged_options(options, batch_size=size), seed=seed)

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


def even(name: str, value: object) -> int:
    """``value`` if it is an even int >= 2."""
    number = at_least(name, value, 2)
    if number % 2:
        raise InputError(f"{name}={value!r} must be even (a batch is halved)")
    return number


def most_slots(batch_size: int, tokens: int, levels: int | None = None) -> int:
    """What one merge-and-reduce tree may hold after so many tokens, or fewer."""
    size = batch_size
    used = (tokens // size).bit_length()  # levels that a half batch has come to
    if levels is None or used < levels:
        return min(tokens, size + used * size // 2)
    last = tokens // (size << (levels - 1)) * size // 2
    return min(tokens, size + (levels - 1) * size // 2 + last)


def batch_for(slots: int, tokens: int = 1 << 20, instances: int = 1) -> int:
    """The largest even batch size t with which ``instances`` merge-and-reduce trees over ``tokens``
    tokens in all hold at most ``slots`` slots: t in level 0, t/2 in each of log2(n/t) + 1 more."""
    size = max(2, slots // instances // 2 * 2)
    while size > 2 and instances * size * (1 + (math.log2(tokens / size) + 1) / 2) > slots:
        size -= 2
    return size
