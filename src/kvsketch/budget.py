"""How many slots a method may keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True)
class Budget:
    """Slots kept per KV head (int), or the kept fraction of the tokens seen (float in (0, 1]).

    Sinks, recent tokens and the compressed middle all count against it.

    Raises:
        InputError: not a number, <= 0, not finite, or a float above 1.
    """

    value: int | float

    def __post_init__(self) -> None:
        value = self.value
        allowed = "an int >= 1 (slots per KV head) or a float in (0, 1] (kept fraction)"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"budget={value!r} is not a number; allowed: {allowed}")
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"budget={value!r} must be positive; allowed: {allowed}")
        if isinstance(value, float) and value > 1:
            raise InputError(
                f"budget={value!r}: a float is the kept fraction and must be <= 1; "
                f"for a number of slots pass an int; allowed: {allowed}"
            )

    @property
    def is_fraction(self) -> bool:
        return isinstance(self.value, float)

    def slots(self, tokens: int) -> int:
        """Slots per KV head that may be kept once ``tokens`` tokens were seen; at least 1."""
        if isinstance(self.value, int):
            return self.value
        return max(1, math.ceil(self.value * tokens - 1e-9))
