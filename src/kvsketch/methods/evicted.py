"""Base of the methods that evict tokens as H2O does and merge them into the tokens they keep."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.methods.h2o import H2O
from kvsketch.slots import Slots


@dataclass(frozen=True)
class Evicted:
    """The slots that a compression keeps and those that it evicts.

    Attributes:
        slots: the slots before the compression, ``[batch, heads, n, ...]``.
        kept: the slots that are kept, ``[batch, heads, m, ...]``, as returned by
            ``Compressor.compress``.
        place: the place of each kept slot in ``slots``, int64 ``[batch, heads, m]``.
        own: which of the kept slots are live, bool ``[batch, heads, m]``.
        gone: which of ``slots`` are live and not kept, bool ``[batch, heads, n]``.
    """

    slots: Slots
    kept: Slots
    place: Tensor
    own: Tensor
    gone: Tensor

    def first(self) -> tuple[Tensor, Tensor]:
        """The places of the evicted slots, in order, int64 ``[batch, heads, most]``, and a bool
        tensor of the same shape: True for the evicted slots of a head, False for the other slots
        that follow them."""
        count = self.gone.sum(-1, keepdim=True)
        most = int(count.max())
        order = self.gone.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        return order[..., :most], torch.arange(most, device=count.device) < count


class Merging(H2O):
    """Base class of methods that keep the same tokens as H2O, including sinks and recent window. A
    subclass merges the evicted tokens into them (``merged``)."""

    keeps_tokens = False

    @abstractmethod
    def merged(self, evicted: Evicted, decoding: bool) -> Slots:
        """The kept slots, with the evicted ones merged into them.

        Args:
            evicted: kept and evicted slots. None may be evicted, if only padding exceeds the
                budget.
            decoding: as for ``compress``.
        """

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        number = torch.arange(slots.count, dtype=torch.float64, device=slots.keys.device)
        marks = number.view(-1, 1).expand(*slots.keys.shape[:3], 1)
        return replace(slots, keys=marks, positions=None)

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, decoding: bool) -> Slots:
        n = slots.count
        place, own = kept.keys.squeeze(-1).long(), kept.live()
        stay = slots.take(place)
        if own is None:
            own = torch.ones_like(place, dtype=torch.bool)
        else:  # dead slots, except in a head that keeps everything
            limit = torch.as_tensor(budget, device=own.device).unsqueeze(-1)
            behind = ~own & (limit < n)
            stay = replace(stay, mass=stay.masses()).map(
                lambda t: t.masked_fill(behind.view(*own.shape, *[1] * (t.dim() - 3)), 0)
            )
        gone = torch.ones(*place.shape[:2], n + 1, dtype=torch.bool, device=place.device)
        gone = gone.scatter(-1, torch.where(own, place, n), False)[..., :n]
        live = slots.live()
        gone = gone if live is None else gone & live
        return self.merged(Evicted(slots, stay, place, own, gone), decoding)
