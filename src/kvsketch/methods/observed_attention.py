"""Observed attention: accumulated attention per query that could have given it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.estimator import attention_received
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class ObservedAttention(Scoring):
    """Keep the tokens that received most attention on average over the queries that saw them.

    H2O's sum divided by the number of its terms, which removes the advantage of old tokens: the
    method that kvpress runs under H2O's name (ObservedAttentionPress; the kept tokens are the
    same). It is not H2O's Algorithm 1, which does not divide: that is ``h2o``.

    Scores are carried over as running means. A slot's number of queries is the number of live slots
    from it
    on: exact while nothing was evicted, smaller afterwards, so that new attention then weighs more
    (a memory of about as many queries as slots are held).
    """

    name = "observed_attention"
    paper = "H2O (2306.14048) as averaged by kvpress's ObservedAttentionPress"
    requires = Requirements(queries=True, values=False)

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        group = observed.queries.shape[1] // slots.keys.shape[1]
        total = attention_received(slots, observed).float() / group
        live = slots.live()
        ones = torch.ones_like(total) if live is None else live.float()
        seen_by = ones.flip(-1).cumsum(-1).flip(-1)
        if slots.score is not None:
            before = seen_by - _live_queries(observed)
            total += slots.score * before.clamp(min=0)
        return total / seen_by.clamp(min=1)


def _live_queries(observed: Observed) -> Tensor | int:
    """Live queries of each row, broadcastable to a score."""
    if observed.live is None:
        return observed.queries.shape[2]
    return observed.live.sum(-1)[:, None, None]
