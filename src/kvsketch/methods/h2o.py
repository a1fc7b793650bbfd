"""H2O: heavy hitters by accumulated attention."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InputError
from ..slots import Observed, Slots, attention_received
from .base import Compressor, keep_top


class H2O(Compressor):
    """Keep the tokens that received most attention so far.

    Attention is summed over all queries seen and the query heads of each KV head, and scores
    accumulate across compressions (Algorithm 1, local statistics). The recent tokens the paper
    keeps beside the heavy ones are the wrapper's ``recent``. The paper evicts after every token;
    the driver evicts once per buffer, from the same sums.

    Needs the queries: all of the prompt's, then each decoded token's.
    """

    name = "h2o"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle (2306.14048)"
    needs_queries = True
    accumulates = True

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            if slots.score is None:
                raise InputError("h2o needs queries: pass observed=Observed(queries, scaling)")
            return slots
        received = attention_received(slots, observed).float()
        return replace(slots, score=received if slots.score is None else slots.score + received)

    def compress(self, slots: Slots, budget: int) -> Slots:
        if slots.score is None:
            raise InputError("h2o needs slots.score; call observe() first")
        return keep_top(slots, slots.score, budget)
