"""TOVA: what the newest query looks at."""

from __future__ import annotations

from dataclasses import replace

from ..slots import Observed, Slots
from .base import Compressor, keep_top
from .snapkv import recent_attention, scored_before


class TOVA(Compressor):
    """Keep the tokens that the newest query attends to most, the same ones in every head.

    TOVA's rule (section 4.2): attention of the last query, averaged over all heads of the layer;
    the kept tokens are those of kvpress's TOVAPress. The last token itself is kept by the
    wrapper's ``recent`` (kvpress: 1). The paper drops one token per decoded token; the driver
    drops a buffer's worth at a time, by the newest query of that moment, and older queries leave
    no trace.

    Where a cache holds groups of heads apart (per-head budgets), the average is over a group.
    """

    name = "tova"
    paper = "Oren et al., Transformers are Multi-State RNNs (2401.06104)"
    needs_queries = True
    window = 1

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            return scored_before(slots, self.name)
        received, fade = recent_attention(slots, observed, window=1)
        score = received.mean(1, keepdim=True).expand_as(received)
        if slots.score is not None:  # fade is 1 in a row where all queries are padding
            score = score + slots.score * fade
        return replace(slots, score=score)

    def compress(self, slots: Slots, budget: int) -> Slots:
        score = scored_before(slots, self.name).score
        assert score is not None
        return keep_top(slots, score, budget)
