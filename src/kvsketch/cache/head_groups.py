"""KV heads with different budgets: one driver per group of heads with the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..slots import Observed, Slots
from .periodic import Periodic, joined, waited_enough


class HeadGroups:
    """A layer's KV heads split into groups, each with its own ``Periodic``: no head is padded to
    the size of another, so bytes fall as the budgets say. The loop is over groups, of which there
    are as many as there are different budgets.

    Same verbs as ``Periodic``. While decoding, queries wait here until a group compresses or there
    are enough of them.

    Args:
        groups: KV heads of each group and its driver; together all heads, each once.

    Raises:
        InputError: a head twice, or one missing.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], Periodic]]) -> None:
        heads = [head for members, _ in groups for head in members]
        if sorted(heads) != list(range(len(heads))):
            raise InputError(f"groups must hold every KV head once, got {heads}")
        self.drivers = [driver for _, driver in groups]
        self.sizes = [len(members) for members, _ in groups]
        self.grouped = torch.tensor(heads)  # the model's heads in the order of the groups
        self.order = self.grouped.argsort()  # and back
        self.compressor = self.drivers[0].compressor
        self._indices: dict[tuple[bool, int, torch.device], Tensor] = {}
        self._observed: list[Observed] = []  # queries of decoded tokens that no group has seen yet

    @property
    def seen(self) -> int:
        return self.drivers[0].seen

    @property
    def padded(self) -> bool:
        return any(driver.padded for driver in self.drivers)

    @property
    def compressed(self) -> bool:
        """Whether any group was compressed."""
        return any(driver.compressed for driver in self.drivers)

    @property
    def slots(self) -> Slots:
        """All heads while none is compressed; then the first group's, for shape and dtype only."""
        if self.compressed:
            return self.drivers[0].slots
        grouped = [driver.slots for driver in self.drivers]
        fields = grouped[0].tensors()
        return Slots(
            **{
                name: torch.cat([g.tensors()[name] for g in grouped], dim=1).index_select(
                    1, self.order.to(fields[name].device)
                )
                for name in fields
            }
        )

    @property
    def groups(self) -> list[tuple[list[int], Periodic]]:
        """KV heads of each group, and its driver."""
        members = [part.tolist() for part in torch.split(self.grouped, self.sizes)]
        return list(zip(members, self.drivers, strict=True))

    @property
    def held(self) -> float:
        """Slots per KV head, the mean over heads."""
        counts = [size * d.held for size, d in zip(self.sizes, self.drivers, strict=True)]
        return sum(counts) / sum(self.sizes)

    @property
    def held_by_head(self) -> list[float]:
        """Slots of each KV head, in the model's order."""
        pairs = zip(self.sizes, self.drivers, strict=True)
        counts = [driver.held for size, driver in pairs for _ in range(size)]
        return [counts[i] for i in self.order.tolist()]

    @property
    def error(self) -> Tensor | None:
        """As ``Periodic.error``; 0 for heads that hold all tokens."""
        return self._assembled([driver.error for driver in self.drivers])

    @property
    def running_error(self) -> Tensor | None:
        """As ``Periodic.running_error``; 0 for heads that hold all tokens."""
        return self._assembled([driver.running_error for driver in self.drivers])

    def _assembled(self, errors: Sequence[Tensor | None]) -> Tensor | None:
        known = next((e for e in errors if e is not None), None)
        if known is None:
            return None
        parts = [
            known.new_zeros(known.shape[0], size) if error is None else error
            for size, error in zip(self.sizes, errors, strict=True)
        ]
        return torch.cat(parts, dim=1)[:, self.order.to(known.device)]

    def wants_queries(self, count: int) -> bool:
        return any(driver.wants_queries(count) for driver in self.drivers)

    def split(self, tensor: Tensor, apart: bool = False) -> Sequence[Tensor]:
        """Each group's part of ``[batch, heads, ...]``, the heads the model's KV heads or its
        attention heads: views of one copy, or (``apart``) copies of their own."""
        share = tensor.shape[1] // len(self.order)
        sizes = [size * share for size in self.sizes]
        index = self._index(tensor, back=False)
        if apart:
            return [tensor.index_select(1, part) for part in torch.split(index, sizes)]
        parts: Sequence[Tensor] = torch.split(tensor.index_select(1, index), sizes, dim=1)
        return parts

    def split_heads(self, numbers: Tensor | None) -> Sequence[Tensor | None]:
        """Each group's part of one number per attention head, if there are any."""
        if numbers is None:
            return [None] * len(self.drivers)
        return [part[0] for part in self.split(numbers[None])]

    def assemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Attention outputs of the groups, ``[batch, group's attention heads, ...]``, in the
        model's order of heads."""
        whole = torch.cat(list(outputs), dim=1)
        return whole.index_select(1, self._index(whole, back=True))

    def _index(self, like: Tensor, back: bool) -> Tensor:
        """Heads in the order of the groups, or back, on the device of ``like``. Remembered: a
        decoded token should move no index to a device."""
        share = like.shape[1] // len(self.order)
        key = (back, share, like.device)
        if key not in self._indices:
            heads = self.order if back else self.grouped
            index = (heads.unsqueeze(1) * share + torch.arange(share)).flatten()
            self._indices[key] = index.to(like.device)
        return self._indices[key]

    def _handed_over(self) -> Sequence[Observed | None]:
        """Each group's part of the queries that wait; none do after it."""
        if not self._observed:
            return [None] * len(self.drivers)
        whole, self._observed = joined(self._observed), []
        parts = (self.split(whole.queries), *map(self.split_heads, (whole.slopes, whole.sinks)))
        return [
            replace(whole, queries=queries, slopes=slopes, sinks=sinks)
            for queries, slopes, sinks in zip(*parts, strict=True)
        ]

    def reset(self) -> None:
        self._observed = []
        for driver in self.drivers:
            driver.reset()

    def extend(self, new: Slots) -> None:
        # A group that keeps a prompt must not keep the others' part of it alive.
        apart = new.count > 1
        parts = {name: self.split(tensor, apart) for name, tensor in new.tensors().items()}
        for i, driver in enumerate(self.drivers):
            driver.extend(Slots(**{name: part[i] for name, part in parts.items()}))

    def mark_padding(self, live: Tensor) -> None:
        for driver in self.drivers:
            driver.mark_padding(live)

    def settle(self, observed: Observed | None, prefill: bool, hold: bool = False) -> bool:
        """As ``Periodic.settle``, for every group."""
        if observed is not None:
            self._observed.append(observed)
        quiet = not (prefill or hold) and all(driver.quiet for driver in self.drivers)
        if quiet and not waited_enough(self._observed, self.tensors):
            return False
        parts = self._handed_over()
        done = [
            driver.settle(part, prefill, hold)
            for driver, part in zip(self.drivers, parts, strict=True)
        ]
        if not (prefill or hold):  # they have waited once
            for driver in self.drivers:
                driver.fold()
        return any(done)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        for driver in self.drivers:
            driver.map_batch(fn)
        self._observed = [observed.map_batch(fn) for observed in self._observed]

    def number_rows(self, rows: Tensor) -> None:
        """As ``Periodic.number_rows``, for every group."""
        for driver in self.drivers:
            driver.number_rows(rows)

    def crop(self, tokens: int) -> None:
        for driver in self.drivers:
            if driver.compressed and tokens:
                driver.crop(tokens)  # raises before any group changes
        for driver, part in zip(self.drivers, self._handed_over(), strict=True):
            driver.note(part)
            driver.crop(tokens)

    def drop(self, tokens: int) -> None:
        """As ``Periodic.drop``, for every group."""
        for driver in self.drivers:
            driver.drop(tokens)

    def compresses_next(self, tokens: int) -> bool:
        """As ``Periodic.compresses_next``, of any group."""
        return any(driver.compresses_next(tokens) for driver in self.drivers)

    @property
    def above_budget(self) -> bool:
        """Whether any group is, see ``Periodic.above_budget``."""
        return any(driver.above_budget for driver in self.drivers)

    def tensors(self) -> list[Tensor]:
        held = [tensor for driver in self.drivers for tensor in driver.tensors()]
        return held + [observed.queries for observed in self._observed]
