"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from ..slots import Slots
from .base import Compressor


class StreamingLLM(Compressor):
    """Keep the first and the most recent tokens.

    Behind the sink + recent wrapper that is ``sink`` first and ``budget - sink`` last ones ("Sink"
    in SubGen's Table 1).

    Keys keep the positions they were computed at; the paper (section 3.2) re-numbers positions
    inside the cache, which changes nothing for the distances among the recent tokens.
    """

    name = "streaming_llm"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks (2309.17453)"

    def compress(self, slots: Slots, budget: int) -> Slots:
        live = slots.live()
        if live is None:
            return slots.narrow(slots.count - budget, budget)
        # Live slots last, in their old order.
        index = live.to(slots.masses().dtype).argsort(dim=-1, stable=True)[
            ..., slots.count - budget :
        ]
        return slots.take(index)
