"""KV heads with different budgets: one driver per group of heads with the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError
from ..slots import Observed, Slots
from .periodic import Periodic


class HeadGroups:
    """A layer's KV heads split into groups, each with its own ``Periodic``: no head is padded to
    the size of another, so bytes fall as the budgets say. The loop is over groups, of which there
    are as many as there are different budgets.

    Same verbs as ``Periodic``.

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
        self.members = [torch.tensor(list(members)) for members, _ in groups]
        self.order = torch.tensor(heads).argsort()  # from grouped to the model's order
        self.compressor = self.drivers[0].compressor
        self._indices: dict[tuple[int | None, int, torch.device], Tensor] = {}

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
    def held(self) -> float:
        """Slots per KV head, the mean over heads."""
        counts = [len(m) * d.held for m, d in zip(self.members, self.drivers, strict=True)]
        return sum(counts) / sum(len(m) for m in self.members)

    @property
    def held_by_head(self) -> list[float]:
        """Slots of each KV head, in the model's order."""
        counts = [d.held for m, d in zip(self.members, self.drivers, strict=True) for _ in m]
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
            known.new_zeros(known.shape[0], len(members)) if error is None else error
            for members, error in zip(self.members, errors, strict=True)
        ]
        return torch.cat(parts, dim=1)[:, self.order.to(known.device)]

    def wants_queries(self, count: int) -> bool:
        return any(driver.wants_queries(count) for driver in self.drivers)

    def queries_of(self, group: int, queries: Tensor) -> Tensor:
        """The query heads of a group: ``[batch, num_attention_heads, ...]`` to those of its KV
        heads."""
        return queries.index_select(1, self._index(group, queries))

    def assemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Attention outputs of the groups, ``[batch, group's query heads, ...]``, in the model's
        order of heads."""
        whole = torch.cat(list(outputs), dim=1)
        return whole.index_select(1, self._index(None, whole))

    def _index(self, group: int | None, like: Tensor) -> Tensor:
        """Query heads of a group, or (None) the model's order of grouped heads, on the device of
        ``like``. Remembered: a decoded token should move no index to a device."""
        share = like.shape[1] // len(self.order)
        key = (group, share, like.device)
        if key not in self._indices:
            heads = self.order if group is None else self.members[group]
            index = (heads.unsqueeze(1) * share + torch.arange(share)).flatten()
            self._indices[key] = index.to(like.device)
        return self._indices[key]

    def observed_by(self, group: int, observed: Observed | None) -> Observed | None:
        """A group's part of what was observed."""
        if observed is None:
            return None
        slopes = observed.slopes
        if slopes is not None:
            slopes = self.queries_of(group, slopes[None])[0]
        return replace(observed, queries=self.queries_of(group, observed.queries), slopes=slopes)

    def reset(self) -> None:
        for driver in self.drivers:
            driver.reset()

    def extend(self, new: Slots) -> None:
        for i, driver in enumerate(self.drivers):
            index = self._index(i, new.keys)
            driver.extend(new.map(partial(torch.index_select, dim=1, index=index)))

    def mark_padding(self, live: Tensor) -> None:
        for driver in self.drivers:
            driver.mark_padding(live)

    def settle(self, observed: Observed | None, prefill: bool, hold: bool = False) -> bool:
        """As ``Periodic.settle``, for every group."""
        done = [
            driver.settle(self.observed_by(i, observed), prefill, hold)
            for i, driver in enumerate(self.drivers)
        ]
        return any(done)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        for driver in self.drivers:
            driver.map_batch(fn)

    def crop(self, tokens: int) -> None:
        for driver in self.drivers:
            if driver.compressed and tokens:
                driver.crop(tokens)  # raises before any group changes
        for driver in self.drivers:
            driver.crop(tokens)

    def tensors(self) -> list[Tensor]:
        return [tensor for driver in self.drivers for tensor in driver.tensors()]
