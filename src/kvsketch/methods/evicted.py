"""What methods share that evict tokens as H2O does and merge them into those that stay."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..slots import Slots
from .h2o import H2O


@dataclass(frozen=True)
class Evicted:
    """What a compression keeps and what it does not.

    Attributes:
        slots: those before, ``[batch, heads, n, ...]``.
        kept: those that stay, ``[batch, heads, m, ...]``, as ``Compressor.compress`` returns them.
        place: where these are in ``slots``, int64 ``[batch, heads, m]``.
        own: which of them are live, bool ``[batch, heads, m]``.
        gone: which of ``slots`` are live and do not stay, bool ``[batch, heads, n]``.
    """

    slots: Slots
    kept: Slots
    place: Tensor
    own: Tensor
    gone: Tensor

    def first(self) -> tuple[Tensor, Tensor]:
        """Where the slots are that do not stay, in order, int64 ``[batch, heads, most]``, and which
        of these there are (bool): behind a head's own come others."""
        count = self.gone.sum(-1, keepdim=True)
        most = int(count.max())
        order = self.gone.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        return order[..., :most], torch.arange(most, device=count.device) < count


class Merging(H2O):
    """Base class of methods that keep what H2O keeps, including sinks and recent window: a subclass
    says what becomes of it once the others are known (``merged``)."""

    @abstractmethod
    def merged(self, evicted: Evicted, fit: bool) -> Slots:
        """The slots that stay, with what goes merged into them.

        Args:
            evicted: perhaps no slot goes, if all that does not fit the budget is padding.
            fit: as for ``compress``.
        """

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        number = torch.arange(slots.count, dtype=torch.float64, device=slots.keys.device)
        marks = number.view(-1, 1).expand(*slots.keys.shape[:3], 1)
        return replace(slots, keys=marks, positions=None)

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, fit: bool) -> Slots:
        n = slots.count
        place, own = kept.keys.squeeze(-1).long(), kept.live()
        stay = slots.take(place)
        if own is None:
            own = torch.ones_like(place, dtype=torch.bool)
        else:  # dead ones, but for those of a head that keeps everything
            limit = torch.as_tensor(budget, device=own.device).unsqueeze(-1)
            behind = ~own & (limit < n)
            stay = replace(stay, mass=stay.masses()).map(
                lambda t: t.masked_fill(behind.view(*own.shape, *[1] * (t.dim() - 3)), 0)
            )
        gone = torch.ones(*place.shape[:2], n + 1, dtype=torch.bool, device=place.device)
        gone = gone.scatter(-1, torch.where(own, place, n), False)[..., :n]
        live = slots.live()
        gone = gone if live is None else gone & live
        return self.merged(Evicted(slots, stay, place, own, gone), fit)
