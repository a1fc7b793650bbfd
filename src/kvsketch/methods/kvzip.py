"""KVzip: scores by the attention of a model that reads the context a second time."""

from __future__ import annotations

from torch import Tensor

from kvsketch.errors import UnsupportedError
from kvsketch.methods.learned import learned_scores
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.rereading import reread_attention
from kvsketch.methods.scoring import Scoring, score_of
from kvsketch.observed import Observed
from kvsketch.slots import Slots


class KVzip(Scoring):
    """Keep the tokens with most attention when the model reads the context again.

    A token's score is the largest attention that any query of the second reading, and any query
    head of its KV head, gives it, where the softmax is over the part that is being read again, the
    first four tokens and the second reading itself (Algorithm 1; so are the scores of kvpress's
    KVzipPress). Scores are compared over all layers and heads: ``allocation="global"``.

    It needs ``kvsketch.prefill(model, input_ids, cache, queries="reread")``, which costs about a
    second prefill (or "local" or "sample", whose scores are no longer the paper's). Tokens decoded
    later are not part of the context and are evicted last.
    """

    name = "kvzip"
    paper = "Kim et al., KVzip: Query-Agnostic KV Cache Compression (2505.23416)"
    requires = Requirements(queries=True, values=False, second_reading="required")
    allocation = "global"
    above = 2.0  # every attention; what tokens decoded later score

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        return reread_attention(slots, observed, about)

    def complete(self, slots: Slots, sample: Tensor, echo: Tensor | None) -> Slots:
        return learned_scores(slots, sample)

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        if observed.after:
            raise UnsupportedError("kvzip needs the tokens of a second reading, not only queries")
        score = score_of(slots, self.name).clone()
        score[..., slots.count - observed.queries.shape[2] :] = self.above
        return score
