"""How many slots a method may keep, in every layer and KV head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from kvsketch.errors import InputError

#: Shares of the budget per layer, or per layer and KV head.
Schedule = Sequence[float] | Sequence[Sequence[float]]

#: How a budget can be divided among layers and heads, besides a schedule or curves.
ALLOCATIONS = ("even", "measured", "layer", "global", "variance")


#: The fraction of the average budget that every head keeps at least if the heads of a layer
#: compete: AdaKV's alpha, with the value of its authors and of kvpress.
SAFEGUARD = 0.2


def plain(value: Any) -> Any:
    """A number of another library, such as ``numpy.int64``, as Python's own, which a file can hold;
    anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True)
class Budget:
    """The bytes of so many tokens per KV head (int), or of this fraction of the tokens seen (float
    in (0, 1]), in the model's own dtype. In that dtype it is the number of slots that are kept;
    ``cache.storage.Price`` says how many it buys in fewer bits.

    Sinks, recent tokens and the compressed middle all count against it.

    Args:
        value: the budget on average over layers and heads.
        share: the share of these heads; 1 is the average (see ``scheduled``). A budget above all
            tokens keeps all tokens.
        limit: the largest number of slots, also for a fraction; None: no limit.

    Raises:
        InputError: not a number, <= 0, not finite, or a float above 1.
    """

    value: int | float
    share: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        value = self.value
        allowed = (
            "an int >= 1 (the bytes of so many tokens per KV head) or a float in (0, 1] (the kept "
            "fraction of the bytes)"
        )
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(f"budget={value!r} is not a number; allowed: {allowed}")
        # Convert NumPy numbers to Python numbers.
        value = int(value) if isinstance(value, Integral) else float(value)
        object.__setattr__(self, "value", value)
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"budget={value!r} must be positive; allowed: {allowed}")
        if isinstance(value, float) and value > 1:
            raise InputError(
                f"budget={value!r}: a float is the kept fraction and must be <= 1; "
                f"for a number of tokens pass an int; allowed: {allowed}"
            )

    @property
    def is_fraction(self) -> bool:
        return isinstance(self.value, float)

    def slots(self, tokens: int) -> int:
        """Slots per KV head that may be kept after ``tokens`` tokens; at least 1. A share applies
        only when there are more tokens than the average budget; before that, all tokens are
        kept."""
        if isinstance(self.value, int):
            if self.share == 1 or tokens <= self.value:
                return self.value
            return max(1, round(self.value * self.share))
        slots = _part(self.value * self.share, tokens)
        return slots if self.limit is None else min(slots, self.limit)

    def average(self, tokens: int) -> int:
        """Slots per KV head on average over all heads that share the budget; for a tolerance, which
        has no average, the budget of these heads. The same on every rank of a sharded model."""
        if isinstance(self.value, int):
            return self.value
        return self.slots(tokens) if self.value >= 1 else _part(self.value, tokens)


def _part(share: float, tokens: int) -> int:
    return max(1, math.ceil(share * tokens - 1e-9))


def scheduled(
    budget: Budget, schedule: Schedule | None, layers: int, heads: Sequence[int]
) -> list[list[Budget]]:
    """The budget of every KV head of every layer.

    Args:
        budget: the average.
        schedule: shares, one per layer or one per layer and KV head, >= 0 with mean 1 over all
            heads, so that the total equals ``budget``; None: the same everywhere.
        layers: how many layers are compressed.
        heads: KV heads of each of them.

    Raises:
        InputError: a wrong number of layers or heads, a share that is negative or not a number,
            or a mean that is not 1.
    """
    if schedule is None:
        return [[budget] * count for count in heads]
    if len(schedule) != layers:
        raise InputError(f"allocation has shares of {len(schedule)} layers, must have {layers}")
    shares: list[list[float]] = []
    given: list[float | Sequence[float]] = list(schedule)
    for layer, (share, count) in enumerate(zip(given, heads, strict=True)):
        row = list(share) if isinstance(share, Sequence) else [share] * count
        if len(row) != count:
            raise InputError(f"allocation[{layer}] has {len(row)} heads, must have {count}")
        if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in row):
            raise InputError(f"allocation[{layer}]={share!r} must be finite numbers >= 0")
        shares.append(row)
    total = sum(map(sum, shares))
    mean = total / sum(heads)
    if not math.isclose(mean, 1.0, rel_tol=1e-3):
        raise InputError(
            f"allocation sums to {total:.6g} over {sum(heads)} KV heads, a mean of {mean:.6g}; the "
            "mean must be 1, so that the total equals the budget"
        )
    return [[Budget(budget.value, x) for x in row] for row in shares]
