"""H2O: heavy hitters by accumulated attention."""

from __future__ import annotations

from torch import Tensor

from kvsketch.estimator import attention_received
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class H2O(Scoring):
    """Keep the tokens that have received most attention so far.

    Attention is summed over all queries seen and the query heads of each KV head, and scores
    accumulate across compressions (Algorithm 1, local statistics). The recent tokens that the paper
    keeps in addition to the heavy ones are those of ``recent``. The paper evicts after every token;
    the cache evicts once per buffer, by the same sums.

    Needs the queries: all of the prompt's, then each decoded token's.
    """

    name = "h2o"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle (2306.14048)"
    local = True
    requires = Requirements(queries=True, values=False, second_reading="allowed")

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        received = attention_received(slots, observed).float()
        return received if slots.score is None else slots.score + received
