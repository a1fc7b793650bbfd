"""CriticalKV: scores by attention and by the contribution of a token's value to the output."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.budget import SAFEGUARD
from kvsketch.errors import InputError
from kvsketch.methods.base import keep_top
from kvsketch.methods.beside import column_of, with_columns, without_columns
from kvsketch.methods.output import output_norms
from kvsketch.methods.scoring import score_of
from kvsketch.methods.snapkv import SnapKV
from kvsketch.slots import Slots


class CriticalKV(SnapKV):
    """Keep half of the budget by SnapKV's scores; then, of the other tokens, those with the largest
    product of their score and the l1 norm of the contribution of their value to the output, v W_O.

    The paper's Algorithm 1 (and kvpress's CriticalKVPress around SnapKVPress: the same tokens are
    kept, with ``sink = 0`` and ``recent = window``). The norm is averaged over the query heads of
    each KV head; sinks and recent window count as the first half's. With ``allocation="layer"`` it
    is the paper's Ada form: heads share the layer's budget by SnapKV's scores first. A head's first
    half is then at least AdaKV's safeguard, a fifth of the average budget (as in kvpress's
    CriticalAdaKVPress: the same tokens are kept).

    It needs the weight of the model's output projection, which ``SketchCache`` passes to it; models
    without one are refused by name. Without a cache: set ``output``.

    Args:
        first_stage: fraction of the budget that is chosen by scores alone, in [0, 1].
        epsilon: constant that is added to a score before it is multiplied, >= 0.
        window: as for ``SnapKV``.
        kernel_size: as for ``SnapKV``.

    Raises:
        InputError: an argument out of range.
    """

    name = "criticalkv"
    paper = "Feng et al., Identify Critical KV Cache in LLM Inference (2502.03805)"
    requires = replace(SnapKV.requires, output=True)

    def __init__(
        self,
        first_stage: float = 0.5,
        epsilon: float = 1e-4,
        window: int = 32,
        kernel_size: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__(window, kernel_size, seed)
        if isinstance(first_stage, bool) or not 0 <= first_stage <= 1:
            raise InputError(f"first_stage={first_stage!r} must be a number in [0, 1]")
        if isinstance(epsilon, bool) or not epsilon >= 0:
            raise InputError(f"epsilon={epsilon!r} must be a number >= 0")
        self.first_stage, self.epsilon = first_stage, epsilon

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        norms = output_norms(slots, self.output, self.name, order=1).mean(2)
        whole = torch.as_tensor(budget, device=norms.device).expand(slots.keys.shape[:2]).double()
        first = (whole * self.first_stage).floor()
        if isinstance(budget, Tensor):
            first = first.maximum((whole.mean(1, keepdim=True) * SAFEGUARD).floor())
        return with_columns(slots, norms, (first - sink - recent).unsqueeze(-1))

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, fit: bool) -> Slots:
        return without_columns(kept, 2, slots.keys.dtype)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        score = score_of(slots, self.name)
        live = slots.live()
        if live is not None:
            score = score.masked_fill(~live, -torch.inf)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        added = (score + self.epsilon) * column_of(slots, -2).to(score.dtype)
        by_score = rank < column_of(slots, -1)
        return keep_top(slots, added.masked_fill(by_score, torch.inf), budget)
