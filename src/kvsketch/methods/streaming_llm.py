"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods.base import Compressor
from kvsketch.slots import Slots


class StreamingLLM(Compressor):
    """Keep the first and the most recent tokens.

    With ``sink`` that is ``sink`` first and ``budget - sink`` last ones ("Sink" in SubGen's Table
    1).

    Keys keep the positions they were computed at; the paper (section 3.2) re-numbers positions
    inside the cache, which changes nothing for the distances among the recent tokens.
    """

    name = "streaming_llm"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks (2309.17453)"
    ragged = True
    keeps_tokens = True

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        live = slots.live()
        if isinstance(budget, Tensor):  # live slots come first
            count = slots.count if live is None else live.sum(-1)
            column = torch.arange(int(budget.max()), device=budget.device)
            last = (count - budget).unsqueeze(-1) + column
            return slots.take(last.clamp(max=slots.count - 1))
        if live is None:
            return slots.narrow(slots.count - budget, budget)
        # Live slots last, in their old order.
        index = live.to(slots.masses().dtype).argsort(dim=-1, stable=True)[
            ..., slots.count - budget :
        ]
        return slots.take(index)
