"""CaM: the values of evicted tokens are added to the tokens that follow them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.evicted import Evicted, Merging
from kvsketch.methods.scoring import score_of
from kvsketch.slots import Slots


class CaM(Merging):
    """Keep the tokens that H2O keeps. The value of a token that decoding evicts, divided by
    ``neighbours``, is added to each of the ``neighbours`` kept tokens that follow it. This happens
    with a probability equal to the ratio of its accumulated attention to their mean, at most 1.

    The paper's rule, in the form that kvpress's CAMPress has for several tokens at once: given the
    same scores and random numbers the slots are the same. Where fewer kept tokens follow, these get
    equal parts; a token that none follows is dropped. Keys stay unchanged, and so do masses (1):
    added values have no mass, as in the paper. For weighted slots the sums of values are added.

    Where it differs from CAMPress: accumulated attention is H2O's, over the prompt's queries too,
    where CAMPress begins with the first decoded one; each KV head evicts by its own scores, where
    CAMPress has the same tokens in all heads, by their mean; and all that decoding evicts is
    merged, where CAMPress merges as many of it as tokens came since. The compression of a prompt
    does not merge (in the paper and in CAMPress only decoding merges): ``compress`` merges with
    ``decoding=True``.

    Args:
        neighbours: kept tokens that an evicted one goes to, >= 1; CAMPress's ``merge_budget``.

    Raises:
        InputError: ``neighbours`` out of range.
    """

    name = "cam"
    paper = "Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference (ICML 2024)"

    def __init__(self, neighbours: int = 32, seed: int = 0) -> None:
        super().__init__(seed)
        self.neighbours = at_least("neighbours", neighbours, 1)

    def merged(self, evicted: Evicted, decoding: bool) -> Slots:
        slots, kept, own, gone = evicted.slots, evicted.kept, evicted.own, evicted.gone
        if not decoding:
            return kept
        uniform = self.random(gone.shape, gone.device)  # whether or not any row loses tokens
        n, width = slots.count, own.shape[-1]
        # Kept tokens in order, the dead behind them.
        rank = torch.where(own, evicted.place, n).argsort(dim=-1, stable=True)
        place = torch.where(own, evicted.place, n).gather(-1, rank)
        order, real = evicted.first()
        start = torch.searchsorted(place, order.contiguous())
        end = (start + self.neighbours).minimum(own.sum(-1, keepdim=True))
        count = (end - start).clamp(min=0)
        score = score_of(slots, self.name).double()
        total = torch.zeros(*own.shape[:2], width + 1, dtype=torch.float64, device=score.device)
        kept_score = torch.where(place < n, score.gather(-1, place.clamp(max=n - 1)), 0.0)
        total[..., 1:] = kept_score.cumsum(-1)
        mean = (total.gather(-1, end.maximum(start)) - total.gather(-1, start)) / count
        odds = score.gather(-1, order) / mean  # a number that is none never comes true
        live = slots.live()
        if live is not None:  # the number of a token does not depend on padding
            number = live.long().cumsum(-1) - 1
            uniform = uniform.gather(-1, number.clamp(min=0))
        chance = uniform.gather(-1, order)
        goes = real & (count > 0) & (chance < odds)
        # Every part to a range of kept tokens: what begins at each, less what ended before it.
        part = slots.values.double().gather(2, _wide(order, slots.values))
        part = torch.where(goes.unsqueeze(-1), part / count.clamp(min=1).unsqueeze(-1), 0.0)
        shape = (*own.shape[:2], width + 1, slots.values.shape[3])
        added = torch.zeros(shape, dtype=torch.float64, device=score.device)
        touched = torch.zeros(shape[:3], dtype=torch.int64, device=score.device)
        for at, sign in ((start, 1), (end.maximum(start), -1)):
            added.scatter_add_(2, _wide(at, added), sign * part)
            touched.scatter_add_(2, at, sign * goes.long())
        back = rank.argsort(dim=-1)
        got = touched.cumsum(2).gather(2, back) > 0
        sums = added.cumsum(2).gather(2, _wide(back, added))
        values = (kept.values.double() + sums).to(kept.values.dtype)
        return replace(kept, values=torch.where(got.unsqueeze(-1), values, kept.values))


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """``index`` for every column of ``like``."""
    return index.unsqueeze(-1).expand(*index.shape, like.shape[-1])
