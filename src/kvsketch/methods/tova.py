"""TOVA: what the newest query looks at."""

from __future__ import annotations

from torch import Tensor

from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring, recent_attention
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class TOVA(Scoring):
    """Keep the tokens that the newest query attends to most, the same ones in every head.

    TOVA's rule (section 4.2): attention of the last query, averaged over all heads of the layer;
    the kept tokens are those of kvpress's TOVAPress. The last token itself is kept by ``recent``
    (kvpress: 1). The paper drops one token per decoded token; the cache drops a buffer's worth at a
    time, by the newest query of that moment, and older queries leave no trace.

    With a budget for each head a head keeps the first of the same ranking.
    """

    name = "tova"
    paper = "Oren et al., Transformers are Multi-State RNNs (2401.06104)"
    requires = Requirements(queries=True, values=False)
    window = 1

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        received, fade = recent_attention(slots, observed, window=1)
        score = received.mean(1, keepdim=True).expand_as(received)
        # fade is 1 in a row where all queries are padding
        return score if slots.score is None else score + slots.score * fade
