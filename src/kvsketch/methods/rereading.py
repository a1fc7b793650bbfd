"""Scores by the attention of a second reading of a context."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.estimator import attention_received
from kvsketch.observed import Observed
from kvsketch.reread import fits, largest_share, looked_at
from kvsketch.slots import Slots


def reread_attention(
    slots: Slots, observed: Observed, about: slice | Tensor, factors: Tensor | None = None
) -> Slots:
    """The tokens of a context, scored by the largest attention that any query of a part of the
    second reading, and any query head of its KV head, gives them (KVzip, arXiv:2505.23416, equation
    2). The softmax is over the tokens that are read again, the first four and the second reading
    itself, so that tokens that the second reading does not need score nothing.

    Arguments as for ``Compressor.reread``; what a query gives is multiplied by
    ``observed.weights``, if there are any, and by ``factors``, ``[batch, num_key_value_heads,
    group, tokens]`` of those that are read again.
    """
    q, weights = observed.queries.shape[2], observed.weights
    first, again, own = looked_at(slots, about, q)
    weighed = weights is not None or factors is not None
    if observed.total is not None and not weighed and fits(observed, slots):
        fresh = largest_share(observed, again.keys, observed.total).float()
    else:
        if factors is not None:  # nothing else is scored
            factors = torch.nn.functional.pad(factors, (first.count, own.count))
        parts = Slots.cat([first, again, own])
        found = attention_received(parts, observed, weights, True, factors)
        fresh = found[..., first.count : first.count + again.count]
    context = slots.narrow(0, slots.count - q)
    score = torch.zeros_like(fresh[..., :1]).repeat(1, 1, context.count)
    if context.score is not None:
        score.copy_(context.score)
    score[..., about] = torch.maximum(score[..., about], fresh)
    return replace(context, score=score)
