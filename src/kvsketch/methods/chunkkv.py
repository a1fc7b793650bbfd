"""ChunkKV: whole chunks of tokens, the same ones in every head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.base import keep_top
from kvsketch.methods.scoring import score_of
from kvsketch.methods.snapkv import SnapKV
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class ChunkKV(SnapKV):
    """Keep the chunks of ``chunk`` successive tokens that the last ``window`` queries attended to
    most: SnapKV's scores, averaged over the KV heads of the layer and over each chunk (the paper's
    Algorithm 1, with the scores that kvpress's ChunkKVPress has around SnapKVPress).

    Chunks are cut from what lies between sinks and recent window; pass ``sink = 0`` and ``recent =
    window`` for the paper's. If a budget is not a whole number of chunks, the rest is filled with
    the tokens of highest score of the next best chunk; the paper and kvpress leave it unused. Kept
    tokens are kvpress's if the window begins a chunk there. Otherwise they may differ: kvpress
    gives the window the highest scores, which also raises the tokens that precede it in its first
    chunk. kvpress also keeps the chunks of a batch's first row in all rows; here every row has its
    own.

    Scores are carried over as in SnapKV; later chunks consist of the remaining slots. If heads keep
    different slots (a budget for each head), each uses its own scores.

    Args:
        chunk: tokens in a chunk, >= 1; kvpress's ``chunk_length``.
        window: as for ``SnapKV``.
        kernel_size: as for ``SnapKV``.

    Raises:
        InputError: an argument out of range.
    """

    name = "chunkkv"
    paper = "Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression (2502.00299)"

    def __init__(
        self, chunk: int = 20, window: int = 32, kernel_size: int = 5, seed: int = 0
    ) -> None:
        super().__init__(window, kernel_size, seed)
        self.chunk = at_least("chunk", chunk, 1)

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        score = super().scores(slots, observed)
        shared = score.mean(1, keepdim=True).expand_as(score)
        live = slots.live()
        if live is None:
            return shared
        alike = (live == live[:, :1]).all(-1).all(-1)  # the heads of a row hold the same slots
        return torch.where(alike[:, None, None], shared, score)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        return keep_top(slots, chunk_order(slots, score_of(slots, self.name), self.chunk), budget)


def chunk_order(slots: Slots, score: Tensor, chunk: int) -> Tensor:
    """Numbers that rank slots by the mean score of the chunk they are in, and within a chunk by
    their own: float64 ``[batch, heads, n]``, the highest for the best.

    Args:
        score: float ``[batch, heads, n]``.
        chunk: live slots in a chunk, counted from the first live one; the last may have fewer.
    """
    n, live = slots.count, slots.live()
    there = torch.ones_like(score, dtype=torch.float64) if live is None else live.double()
    number = ((there.cumsum(-1) - 1).clamp(min=0) / chunk).long()
    total = there.new_zeros(*score.shape[:2], -(-n // chunk))
    held = torch.zeros_like(total).scatter_add(-1, number, there).clamp(min=1)
    mean = total.scatter_add(-1, number, score.double() * there) / held
    return -(_ranks(mean).gather(-1, number) * n + _ranks(score)).double()


def _ranks(score: Tensor) -> Tensor:
    """0 for the highest number of each row, 1 for the next; of equal ones the first comes first."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
