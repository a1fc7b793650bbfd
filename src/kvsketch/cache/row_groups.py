"""Rows of a batch with different budgets: one driver per group of rows with the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..methods import Windowed
from ..slots import Observed, Slots
from .head_groups import HeadGroups
from .periodic import Periodic
from .windowed_sketch import WindowedSketch


@dataclass
class RowGroup:
    """Rows of the batch (int64 ``[n]``) and the driver that holds them."""

    rows: Tensor
    driver: Periodic | HeadGroups


class RowGroups:
    """A layer whose rows were told different budgets: what a row holds is what it would hold alone.

    Same verbs as ``Periodic``. The loop is over groups of rows; beams and samples of one prompt
    are one group.

    Args:
        groups: together all rows, each once.

    Raises:
        InputError: a row twice, or one missing.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        rows = sorted(row for group in groups for row in group.rows.tolist())
        if rows != list(range(len(rows))):
            raise InputError(f"groups must hold every row of the batch once, got {rows}")
        self.groups = list(groups)
        self._number()

    def _number(self) -> None:
        """A row's random choices are its own, whatever group it is in."""
        for group in self.groups:
            group.driver.number_rows(group.rows)
        self._indices: dict[torch.device, tuple[list[Tensor], Tensor]] = {}

    def _index(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Each group's rows, and the way back to the order of the batch. Remembered: a decoded
        token should move no index to a device."""
        if device not in self._indices:
            rows = [group.rows for group in self.groups]
            order = torch.cat(rows).argsort()
            self._indices[device] = [part.to(device) for part in rows], order.to(device)
        return self._indices[device]

    @property
    def drivers(self) -> list[Periodic | HeadGroups]:
        return [group.driver for group in self.groups]

    @property
    def first(self) -> Periodic | HeadGroups:
        return self.groups[0].driver

    @property
    def rows(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def compressor(self) -> Windowed | WindowedSketch:
        return self.first.compressor

    @property
    def seen(self) -> int:
        return self.first.seen

    @property
    def padded(self) -> bool:
        return any(driver.padded for driver in self.drivers)

    @property
    def compressed(self) -> bool:
        return any(driver.compressed for driver in self.drivers)

    @property
    def above_budget(self) -> bool:
        return any(driver.above_budget for driver in self.drivers)

    @property
    def slots(self) -> Slots:
        """All rows while none is compressed; then the first group's, for shape and dtype only."""
        if self.compressed:
            return self.first.slots
        parts = [driver.slots for driver in self.drivers]
        return Slots(
            **{
                name: self.assemble([part.tensors()[name] for part in parts])
                for name in parts[0].tensors()
            }
        )

    @property
    def held(self) -> float:
        """Slots per KV head, the mean over rows and heads."""
        return sum(len(g.rows) * g.driver.held for g in self.groups) / self.rows

    @property
    def held_by_head(self) -> list[float]:
        """Slots of each KV head, in the row that holds fewest of it."""
        return [min(held) for held in zip(*(d.held_by_head for d in self.drivers), strict=True)]

    @property
    def error(self) -> Tensor | None:
        """As ``Periodic.error``; 0 for rows that hold all tokens."""
        return self._assembled([driver.error for driver in self.drivers])

    @property
    def running_error(self) -> Tensor | None:
        """As ``Periodic.running_error``; 0 for rows that hold all tokens."""
        return self._assembled([driver.running_error for driver in self.drivers])

    def _assembled(self, errors: Sequence[Tensor | None]) -> Tensor | None:
        known = next((e for e in errors if e is not None), None)
        if known is None:
            return None
        return self.assemble(
            [
                known.new_zeros(len(group.rows), known.shape[1]) if error is None else error
                for group, error in zip(self.groups, errors, strict=True)
            ]
        )

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Each group's rows of ``[batch, ...]``."""
        return [tensor.index_select(0, rows) for rows in self._index(tensor.device)[0]]

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The groups' rows as one tensor, in the order of the batch."""
        whole = torch.cat(list(parts))
        return whole.index_select(0, self._index(whole.device)[1])

    def split_observed(self, observed: Observed | None) -> list[Observed | None]:
        """Each group's part of observed queries."""
        if observed is None:
            return [None] * len(self.groups)
        index = self._index(observed.queries.device)[0]
        return [observed.map_batch(_rows(rows)) for rows in index]

    def wants_queries(self, count: int) -> bool:
        return any(driver.wants_queries(count) for driver in self.drivers)

    def compresses_next(self, tokens: int) -> bool:
        return any(driver.compresses_next(tokens) for driver in self.drivers)

    def extend(self, new: Slots) -> None:
        parts = {name: self.split(tensor) for name, tensor in new.tensors().items()}
        for i, driver in enumerate(self.drivers):
            driver.extend(Slots(**{name: part[i] for name, part in parts.items()}))

    def mark_padding(self, live: Tensor) -> None:
        for driver, part in zip(self.drivers, self.split(live), strict=True):
            driver.mark_padding(part)

    def settle(self, observed: Observed | None, prefill: bool, hold: bool = False) -> bool:
        """As ``Periodic.settle``, for every group of rows."""
        parts = self.split_observed(observed)
        done = [
            driver.settle(part, prefill, hold)
            for driver, part in zip(self.drivers, parts, strict=True)
        ]
        return any(done)

    def drop(self, tokens: int) -> None:
        for driver in self.drivers:
            driver.drop(tokens)

    def crop(self, tokens: int) -> None:
        for driver in self.drivers:
            if driver.compressed and tokens:
                driver.crop(tokens)  # raises before any group changes
        for driver in self.drivers:
            driver.crop(tokens)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Beams, repeated or selected rows: a row takes its budgets with it."""
        source = fn(torch.arange(self.rows))
        groups = []
        for group in self.groups:
            place = torch.full((self.rows,), -1)
            place[group.rows] = torch.arange(len(group.rows))
            local = place[source]
            rows = (local >= 0).nonzero().flatten()
            if len(rows):
                group.driver.map_batch(_rows(local[rows]))
                groups.append(RowGroup(rows, group.driver))
        self.groups = groups
        self._number()

    def tensors(self) -> list[Tensor]:
        return [tensor for driver in self.drivers for tensor in driver.tensors()]


def _rows(index: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_select(0, index.to(tensor.device))
