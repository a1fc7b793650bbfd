"""A compressor with its window, for ``cache.Periodic``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..slots import Observed, Slots
from .base import Compressor
from .window import check_window


class Windowed:
    """``compressor`` with a ``sink`` and a ``recent`` to be called with.

    Raises:
        InputError: sink or recent negative or not an int.
    """

    #: a slot has both u and m, or neither
    split_sums = False

    def __init__(self, compressor: Compressor, sink: int = 4, recent: int = 32) -> None:
        check_window(sink, recent)
        self.compressor, self.sink, self.recent = compressor, sink, recent

    @property
    def needs_queries(self) -> bool:
        return self.compressor.needs_queries

    @property
    def window(self) -> int | None:
        """How many of a prompt's last queries the method looks at; None: all of them."""
        return self.compressor.window

    def recent_at(self, budget: int) -> int:
        """Recent tokens that are kept as they are within a budget."""
        return min(self.recent, budget - min(self.sink, budget))

    def reset(self) -> None:
        """Rows are numbered anew."""
        self.compressor.rows = None

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Rows are numbered anew."""
        self.compressor.rows = None

    def number_rows(self, rows: Tensor) -> None:
        """Say that the rows are part of a larger batch and which ones (int64 ``[batch]``): they
        then keep from here on what they would keep there."""
        self.compressor.rows = rows

    def tensors(self) -> list[Tensor]:
        """Nothing is held."""
        return []

    def observe(self, slots: Slots, observed: Observed) -> Slots:
        return self.compressor.observe(slots, observed)

    def __call__(
        self,
        slots: Slots,
        budget: int | Tensor,
        observed: Observed | None = None,
        *,
        scored: bool = False,
        fit: bool = True,
    ) -> Slots:
        """As ``Compressor.compress``."""
        window = {"sink": self.sink, "recent": self.recent}
        return self.compressor.compress(slots, budget, observed, scored=scored, fit=fit, **window)
