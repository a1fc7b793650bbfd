"""What a second reading of a context looks at."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..slots import Observed, Slots, attention_received

# Tokens at the start that every part of the second reading may look at: kvpress's n_sink.
_SINK = 4


def reread_attention(
    slots: Slots, observed: Observed, span: tuple[int, int], factors: Tensor | None = None
) -> Slots:
    """The tokens of a context, scored by the largest attention that any query of a part of the
    second reading, and any query head of its KV head, gives them (KVzip, arXiv:2505.23416, equation
    2). The softmax is over the tokens that are read again, the first four and the second reading
    itself, so that what the latter can do without scores nothing.

    Arguments as for ``Compressor.reread``; what a query gives is multiplied by
    ``observed.weights``, if there are any, and by ``factors``, ``[batch, num_key_value_heads,
    group, end - start]``.
    """
    start, end = span
    n = slots.count - observed.queries.shape[2]
    first = min(_SINK, start)
    parts = [slots.narrow(0, first), slots.narrow(start, end - start)]
    parts.append(slots.narrow(n, slots.count - n))
    if factors is not None:  # nothing else is scored
        factors = torch.nn.functional.pad(factors, (first, slots.count - n))
    weights = observed.weights
    found = attention_received(Slots.cat(parts), observed, weights, True, factors)
    context = slots.narrow(0, n)
    score = torch.zeros_like(found[..., :1]).repeat(1, 1, n)
    if context.score is not None:
        score.copy_(context.score)
    fresh = found[..., first : first + end - start]
    score[..., start:end] = torch.maximum(score[..., start:end], fresh)
    return replace(context, score=score)
