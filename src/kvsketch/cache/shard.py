"""Tensor parallelism: the KV heads of a process, and communication with the other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from kvsketch.cache.curves import Curves
from kvsketch.errors import UnsupportedError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Shard:
    """A process's place among those that share the KV heads of every layer, in the order of their
    ranks; all run the same prompts in step."""

    rank: int = 0
    ranks: int = 1

    @staticmethod
    def of(local: int, heads: int) -> Shard:
        """Of a process that holds ``local`` of the model's ``heads`` KV heads.

        Raises:
            UnsupportedError: the default process group does not hold the others.
        """
        if local == heads or not (distributed.is_available() and distributed.is_initialized()):
            return Shard()
        ranks = distributed.get_world_size()
        if local * ranks != heads:
            raise UnsupportedError(
                f"this process holds {local} of the model's {heads} KV heads, and the default "
                f"process group has {ranks} ranks: budgets that are allocated over all heads need "
                f"one rank for each {local} heads and no data or pipeline parallelism; "
                "allocation='even' needs neither"
            )
        return Shard(distributed.get_rank(), ranks)

    def own(self, rows: Sequence[_T]) -> Sequence[_T]:
        """What is this process's of one thing per KV head."""
        count = len(rows) // self.ranks
        return rows[self.rank * count : (self.rank + 1) * count]

    def summed(self, number: Tensor) -> Tensor:
        """The sum of one number of every process."""
        return torch.stack([n.to(number.device) for n in self._all(number.cpu())]).sum(0)

    def whole(self, curves: Curves) -> Curves:
        """The curves of all heads, from those of every process's own."""
        parts = self._all(curves)
        relative = [part.relative for part in parts if part.relative is not None]
        return Curves(
            torch.cat([part.error for part in parts], dim=1),
            curves.kept,
            torch.cat(relative, dim=1) if len(relative) == len(parts) else None,
        )

    def whole_held(self, held: Tensor) -> Tensor:
        """Slots of all heads ``[layers, heads]``, from those of every process's own."""
        return torch.cat(self._all(held.cpu()), dim=1)

    def _all(self, mine: _T) -> list[_T]:
        if self.ranks == 1:
            return [mine]
        found: list[Any] = [None] * self.ranks
        distributed.all_gather_object(found, mine)
        return found
