"""D2O: an evicted token is merged into the most similar kept key, if it is similar enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.evicted import Evicted, Merging
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State

# Similarities that are formed at a time.
_BLOCK = 1 << 22


class D2O(Merging):
    """Keep the tokens that H2O keeps. An evicted token is merged into the kept one whose key is
    most similar to its own, if that similarity is at least a threshold; otherwise it is dropped.

    Written from the authors' code and from the paper's equations as quoted in another
    implementation, without access to the paper; differences between the two are listed below.

    Token level: u is the cosine of the keys of an evicted token and its most similar
    kept one (including sinks and recent window). The threshold is the mean of u over the evicted
    tokens the first time, and later an exponential moving average with the new mean (``decay``). A
    kept key and its value become the means of their group, where an evicted token weighs exp(u) and
    the kept one e, which is exp of its similarity with itself. Layer level, budgets by the variance
    of attention, is ``allocation="variance"``, its own way in a ``SketchCache``.

    What is chosen here: each row and KV head matches and has a
    threshold by itself (the authors' code has one threshold for all); where several tokens are
    evicted at once, as here, their mean u enters the average (as in that code, which multiplies
    values by u and divides by their number, where the weights here are the quoted ones). That code
    also leaves the first two layers and the last one whole; here they share the budget.

    The means have no mass: a merged slot counts as one token, mass 1, as in that code, so that a
    group gets less attention than its members did (``heavy_merge`` keeps their sum). Weighted slots
    keep the mass they have.

    The threshold of each head is held between calls, until ``reset``, or until another number of
    rows or heads comes.

    Args:
        decay: weight of the new mean in the moving average, in (0, 1]. The authors' code has 0.5.

    Raises:
        InputError: ``decay`` out of range.
    """

    name = "d2o"
    paper = "Wan et al., D2O: Dynamic Discriminative Operations (2406.13035)"
    allocation = "variance"

    #: of every head, float64 ``[batch, heads]``, NaN where nothing was evicted yet
    threshold: Tensor | None = None

    def __init__(self, decay: float = 0.5, seed: int = 0) -> None:
        super().__init__(seed)
        if isinstance(decay, bool) or not 0 < decay <= 1:
            raise InputError(f"decay={decay!r} must be a number in (0, 1]")
        self.decay = decay
        self.threshold = None

    def merged(self, evicted: Evicted, decoding: bool) -> Slots:
        kept, own = evicted.kept, evicted.own
        order, real = evicted.first()
        if not order.shape[-1]:
            return kept
        lost, count = evicted.slots.take(order), real.sum(-1)
        u, nearest = most_similar(lost.keys, kept.keys, own)
        u = torch.where(real, u, 0.0)
        mean = u.sum(-1) / count  # NaN where nothing goes
        before = self.threshold
        if before is None or before.shape != mean.shape:
            before = torch.full_like(mean, torch.nan)
        found = torch.where(before.isnan(), mean, self.decay * mean + (1 - self.decay) * before)
        self.threshold = torch.where(mean.isnan(), before, found)
        weight = torch.where(real & (u >= self.threshold.unsqueeze(-1)), u.exp(), 0.0)
        added = torch.zeros_like(own, dtype=weight.dtype).scatter_add(-1, nearest, weight)

        def mean_of(mine: Tensor, theirs: Tensor) -> Tensor:
            dtype = compute_dtype(mine.dtype)
            index = nearest.unsqueeze(-1).expand(*nearest.shape, mine.shape[-1])
            part = theirs.to(dtype) * weight.unsqueeze(-1).to(dtype)
            total = (mine.to(dtype) * math.e).scatter_add(2, index, part)
            mixed = total / (math.e + added).unsqueeze(-1).to(dtype)
            return torch.where((added > 0).unsqueeze(-1), mixed.to(mine.dtype), mine)

        values = mean_of(kept.mean_values(), lost.mean_values())
        if kept.mass is not None:
            values = values * torch.where(kept.mass > 0, kept.mass, 1.0).unsqueeze(-1)
            values = torch.where(
                (added > 0).unsqueeze(-1), values.to(kept.values.dtype), kept.values
            )
        return replace(kept, keys=mean_of(kept.keys, lost.keys), values=values)

    def reset(self) -> None:
        super().reset()
        self.threshold = None

    def to_state(self) -> State:
        state = super().to_state()
        state.keep(threshold=self.threshold)
        return state

    def restore(self, reader: Reader, batch: int, heads: int) -> None:
        if reader.has("threshold"):
            shape = (batch, heads)
            self.threshold = reader.tensor("threshold", shape, torch.float64, allow=("nan",))
        super().restore(reader, batch, heads)

    def tensors(self) -> list[Tensor]:
        return [] if self.threshold is None else [self.threshold]

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().map_batch(fn)
        if self.threshold is not None:
            self.threshold = fn(self.threshold)


def most_similar(lost: Tensor, kept: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine of every key with a kept one, and which one that is: float64 and int64
    ``[batch, heads, lost]``.

    Args:
        lost: keys ``[batch, heads, lost, head_dim]``.
        kept: keys ``[batch, heads, kept, head_dim]``.
        own: which of the latter there are, bool ``[batch, heads, kept]``.
    """
    a, b = (
        torch.nn.functional.normalize(x.to(compute_dtype(x.dtype)), dim=-1) for x in (lost, kept)
    )
    step = max(1, _BLOCK // max(1, own.numel()))
    found = []
    for start in range(0, a.shape[2], step):
        cosine = a[:, :, start : start + step] @ b.mT
        found.append(cosine.masked_fill_(~own.unsqueeze(2), -torch.inf).max(-1))
    u = torch.cat([part.values for part in found], dim=-1)
    return u.double(), torch.cat([part.indices for part in found], dim=-1)
