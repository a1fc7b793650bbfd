"""R-KV: tokens that the last queries attend to, less those that repeat later ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import attention_scores, check_queries, query_blocks
from kvsketch.methods.base import keep_top
from kvsketch.methods.beside import column_of, with_columns, without_columns
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring, first_counted, query_weights, score_of
from kvsketch.observed import Observed, causal
from kvsketch.slots import Slots, compute_dtype


class RKV(Scoring):
    """Keep the last ``window`` tokens, and of the others those of the highest ``mix`` * importance
    - (1 - ``mix``) * redundancy.

    The joint selection of importance and redundancy, as the authors' code computes it
    (``R1KV.update_kv``; the kept tokens are the same, with ``sink = 0``). Importance: of the last
    ``window`` queries, the largest logit of the query heads of each KV head, softmax over the
    tokens before the window, averaged over these queries and max-pooled over ``kernel_size``
    neighbours. Redundancy: see ``redundancy``, over all slots, sinks and window included.

    Redundancy is computed whenever a compression is due, in a time that grows with the square
    of the number of slots: the method is made for decoding with a small budget. The authors
    compress every 128 decoded tokens, and a prompt when it is longer than the budget, like
    ``SketchCache``. If fewer than ``window`` queries come at a time, importance is averaged
    over about the last ``window`` queries as in ``snapkv``; a token that had no importance
    before has that of the new queries.

    Where their code differs: it goes on with the kept tokens in the order of their scores, so
    that at the next compression neighbours and newest tokens are others; here the order stays
    that of the tokens. It takes one row of a batch, scales by 1 / sqrt(head_dim) and has no
    soft-capping; here rows are independent, and logits are those of the model. Attention sinks
    in the softmax (gpt-oss) take no share. Their code has ``mix`` 0.07; 0.1 is that of
    TriAttention's authors, who compare with this method.

    Args:
        window: number of last queries whose attention counts, and of last tokens that are kept
            first, >= 1.
        kernel_size: width of the pooling, odd and >= 1 (1: none).
        mix: weight of the importance, in [0, 1].
        threshold: cosine above which two keys are similar, in [0, 1].

    Raises:
        InputError: an argument out of range.
    """

    name = "rkv"
    paper = "Cai et al., R-KV: Redundancy-aware KV Cache Compression (2505.24133)"
    requires = Requirements(queries=True, values=False)
    window: int

    def __init__(
        self,
        window: int = 8,
        kernel_size: int = 7,
        mix: float = 0.1,
        threshold: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)
        self.kernel_size = at_least("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise InputError(f"kernel_size={kernel_size} must be odd, so that it has a middle")
        for name, value in (("mix", mix), ("threshold", threshold)):
            if isinstance(value, bool) or not 0 <= value <= 1:
                raise InputError(f"{name}={value!r} must be a number in [0, 1]")
        self.mix, self.threshold = mix, threshold

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        check_queries(observed.queries, slots, observed.slopes)
        weights, fade = query_weights(observed, self.window)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        before = _newer(slots) >= self.window
        received = _attention(slots, observed, weights, before)
        width = self.kernel_size
        score = F.max_pool1d(received, width, stride=1, padding=width // 2) * before
        if slots.score is None:
            return score
        return torch.where(slots.score > 0, slots.score * fade + score * (1 - fade), score)

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        score, newer = score_of(slots, self.name), _newer(slots)
        joint = self.mix * score - (1 - self.mix) * redundancy(slots, self.threshold)
        first = 2.0 - newer.float() / (1 + self.window)  # above all others, the newest highest
        return with_columns(slots, torch.where(newer < self.window, first, joint))

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, fit: bool) -> Slots:
        return without_columns(kept, 1, slots.keys.dtype)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        return keep_top(slots, column_of(slots, -1), budget)


def redundancy(slots: Slots, threshold: float) -> Tensor:
    """How much every slot repeats others, float32 ``[batch, heads, n]``: softmax over the live
    slots of the mean cosine of its key with those of all live slots.

    Cosines of a slot with itself are 0, and so is that of every slot with the newest one that is
    similar to it (cosine above the threshold), so that the newest of similar slots is not redundant
    on their account. If none is similar, it is that with the first slot, as in the authors' code
    (``cal_similarity``).
    """
    n, live = slots.count, slots.live()
    unit = F.normalize(slots.keys.to(compute_dtype(slots.keys.dtype)), dim=-1)
    there = torch.ones_like(unit[..., 0], dtype=torch.bool) if live is None else live
    unit = unit * there.unsqueeze(-1)
    oldest = there.to(torch.uint8).argmax(-1, keepdim=True)
    place = torch.arange(n, device=unit.device)
    total = torch.zeros_like(unit[..., 0])
    for rows in query_blocks(unit, n):
        cosine = unit[:, :, rows] @ unit.mT
        own = place[rows].view(-1, 1).expand(*cosine.shape[:3], 1)
        cosine.scatter_(-1, own, 0.0)
        newest = torch.where(cosine > threshold, place, -1).amax(-1)
        newest = torch.where(newest < 0, oldest, newest)
        total += cosine.scatter_(-1, newest.unsqueeze(-1), 0.0).sum(2)
    mean = total / there.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, -torch.inf).softmax(-1).nan_to_num(0.0).float()


def _newer(slots: Slots) -> Tensor:
    """The number of live slots after every slot, int64 ``[batch, heads, n]``."""
    live = slots.live()
    live = torch.ones_like(slots.keys[..., 0], dtype=torch.bool) if live is None else live
    return live.long().flip(-1).cumsum(-1).flip(-1) - live.long()


def _attention(slots: Slots, observed: Observed, weights: Tensor, before: Tensor) -> Tensor:
    """Softmax, over the slots ``before`` the window that a query sees, of the largest logit of the
    query heads of each KV head, summed over queries times their weights.

    Args:
        weights: float32 ``[batch, q]``.
        before: bool ``[batch, heads, n]``.

    Returns:
        float32 ``[batch, heads, n]``.
    """
    total = torch.zeros_like(before, dtype=torch.float32)
    live, asked = slots.live(), observed.queries
    start = first_counted(weights)
    if start == weights.shape[1]:
        return total
    hidden = ~before if live is None else ~(before & live)
    seen = None if observed.after else causal(asked.shape[2], slots.count, asked.device)
    settings = observed.scaling, observed.softcap, None, observed.slopes
    for rows in query_blocks(asked[:, :, start:], slots.count):
        rows = slice(start + rows.start, start + rows.stop)
        logits = attention_scores(asked[:, :, rows], slots, *settings).amax(2)
        if slots.mass is not None:
            logits += slots.mass.to(logits.dtype).log().unsqueeze(2)
        masked = hidden.unsqueeze(2) if seen is None else hidden.unsqueeze(2) | ~seen[:, :, rows]
        share = logits.masked_fill(masked, -torch.inf).softmax(-1).nan_to_num(0.0)
        total += torch.einsum("bhqn,bq->bhn", share, weights[:, rows].to(share.dtype)).float()
    return total
