"""Uniform sampling with unbiased weights: the baseline every sampler must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods.base import Compressor
from kvsketch.slots import Slots


class Uniform(Compressor):
    """Keep a uniform sample of the tokens with unbiased weights.

    Without replacement; u and m are divided by the inclusion probability, so numerator and
    denominator stay unbiased (Horvitz-Thompson).

    On weighted input the inclusion probability is proportional to the mass (capped at 1), so that
    compressing again is still a uniform sample of the *tokens* and weights do not pile up.
    Baseline of BalanceKV (section 4.1).
    """

    name = "uniform"
    paper = "baseline in BalanceKV (arXiv:2502.07861)"
    guarantee = "numerator and denominator are unbiased (Horvitz-Thompson)"
    ragged = True

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        mass = slots.masses().double()
        live = slots.live()
        # A numerator-only slot (m = 0, u != 0) still needs a chance: count it as one token.
        size = torch.where(mass > 0, mass, 1.0)
        if live is not None:
            size = size * live
        chance = inclusion_probabilities(size, budget)
        # Systematic sampling along a random order: fixed sample size, exact probabilities.
        order = self.random(chance.shape, chance.device).argsort(-1)
        upper = chance.gather(-1, order).cumsum(-1)
        start = self.random(chance.shape[:2], chance.device).unsqueeze(-1)
        steps = torch.floor(upper + start)
        hit = torch.diff(steps, dim=-1, prepend=torch.zeros_like(steps[..., :1])) > 0
        chosen = torch.zeros_like(hit).scatter(-1, order, hit)
        weight = torch.where(chosen, 1 / chance.clamp(min=1e-300), 0.0)
        if isinstance(budget, Tensor):
            most = int(budget.max())
            order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            index = order[..., :most]
        else:  # rows with fewer live slots than the budget are filled up with dead ones
            index = chosen.to(torch.uint8).topk(budget, dim=-1).indices.sort(dim=-1).values
        return slots.take(index).scaled(weight.gather(-1, index).float())


def inclusion_probabilities(size: Tensor, budget: int | Tensor) -> Tensor:
    """min(1, size / tau) with tau such that they sum to ``budget`` (or all ones when fewer slots
    have a positive size).

    Args:
        size: float64 ``[batch, heads, n]``, >= 0.
        budget: one for all, or int64 ``[batch, heads]``.
    """
    if isinstance(budget, Tensor):
        budget = budget.unsqueeze(-1)
    total = size.sum(-1, keepdim=True)
    plain = size * (budget / total.clamp(min=1e-300))
    free = (plain <= 1).all(-1, keepdim=True)  # nothing to cap
    if bool(free.all()):
        return plain
    ordered = size.sort(dim=-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)  # sum of this size and all smaller ones
    capped = torch.arange(size.shape[-1], device=size.device)
    left = budget - capped
    # With c capped slots tau is rest[c] / (budget - c); the right c is the first that caps no more.
    tau = torch.where(left > 0, rest / left.clamp(min=1), torch.inf)
    fits = (ordered <= tau) & (left > 0)
    first = fits.to(torch.uint8).argmax(-1, keepdim=True)
    tau = torch.where(fits.any(-1, keepdim=True), tau.gather(-1, first), 0.0)
    below = torch.where(size > 0, (size / tau.clamp(min=1e-300)).clamp(max=1.0), 0.0)
    return torch.where(free, plain, below)
