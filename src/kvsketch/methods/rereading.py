"""What a second reading of a context looks at."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.again import fits, largest_share, looked_at
from ..slots import Observed, Slots, attention_received


def reread_attention(slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
    """The tokens of a context, scored by the largest attention that any query of a part of the
    second reading, and any query head of its KV head, gives them (KVzip, arXiv:2505.23416, equation
    2). The softmax is over the tokens that are read again, the first four and the second reading
    itself, so that what the latter can do without scores nothing.

    Arguments as for ``Compressor.reread``.
    """
    q = observed.queries.shape[2]
    first, again, own = looked_at(slots, about, q)
    if observed.total is not None and fits(observed, slots):
        fresh = largest_share(observed, again.keys, observed.total).float()
    else:
        found = attention_received(Slots.cat([first, again, own]), observed, largest=True)
        fresh = found[..., first.count : first.count + again.count]
    context = slots.narrow(0, slots.count - q)
    score = torch.zeros_like(fresh[..., :1]).repeat(1, 1, context.count)
    if context.score is not None:
        score.copy_(context.score)
    score[..., about] = torch.maximum(score[..., about], fresh)
    return replace(context, score=score)
