"""Expected attention: the attention of future queries with the distribution of the last ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.estimator import attention_scores, check_queries, per_group, query_blocks
from kvsketch.methods.scoring import Scoring, blended, first_counted, query_weights
from kvsketch.observed import Observed
from kvsketch.slots import Slots, compute_dtype

# A slot without mass may outweigh all that have one; exp(80) is still finite in float32.
_MAX_EXPONENT = 80.0


class ExpectedAttention(Scoring):
    """Keep the tokens with the largest expected contribution to the outputs of future queries.

    For queries q ~ N(mu, S), E exp(<q, k>) = exp(<mu, k> + k'Sk / 2) (the paper's section 3); the
    score is that over its total, averaged over the query heads of each KV head, times the norm of
    the value-sum u.

    It differs from the paper and from kvpress's ExpectedAttentionPress, so kept tokens need not be
    theirs: mu and S are the mean and covariance of the last ``window`` queries *as attention saw
    them*, after RoPE, where the paper takes the prompt's queries before RoPE and turns them by the
    average rotation of the next 512 positions. A compressor does not see the model; the last
    queries carry rotations near the coming ones. Without RoPE the two agree where window is the
    prompt and no sinks are set aside. In return it works with soft-capping (moments are taken of
    the capped scores) and ALiBi.

    Later queries update the score: with q < ``window`` of them, the old score has weight (1 -
    1/window)^q and the score by the new queries the rest. New slots have no old score and get the
    new one.

    Args:
        window: number of last queries for mean and covariance, >= 1; all queries if there are
            fewer.

    Raises:
        InputError: ``window`` out of range.
    """

    name = "expected_attention"
    paper = "Devoto et al., Expected Attention (2510.00636)"
    window: int

    def __init__(self, window: int = 512, seed: int = 0) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        weights, fade = query_weights(observed, self.window)
        uniform = (weights != 0).float()
        uniform = uniform / uniform.sum(-1, keepdim=True).clamp(min=1)
        exponent = log_expected(slots, observed, uniform)
        total = exponent
        if slots.mass is not None:
            total = exponent + slots.mass.to(exponent.dtype).log()[:, :, None]
        total = total.logsumexp(-1, keepdim=True)
        if observed.sinks is not None:
            sink = per_group(observed.sinks, slots.keys.shape[1], observed.queries)
            total = torch.logaddexp(total, sink[..., 0].to(total.dtype))
        total = total.nan_to_num(neginf=0.0)
        share = (exponent - total).clamp(max=_MAX_EXPONENT).exp().mean(2).float()
        wide = compute_dtype(slots.values.dtype)
        score: Tensor = share * torch.linalg.vector_norm(slots.values, dim=-1, dtype=wide).float()
        return blended(score, slots, observed, fade)


def log_expected(slots: Slots, observed: Observed, weights: Tensor) -> Tensor:
    """log E exp(score) of normal queries: mean + variance / 2 of each slot's scores.

    Args:
        weights: float ``[batch, q]``, of the queries in mean and variance; rows sum to 1 (or 0).

    Returns:
        ``[batch, num_key_value_heads, group, slots]``, at least float32.

    Raises:
        InputError: queries that do not fit the keys.
    """
    queries = observed.queries
    check_queries(queries, slots, observed.slopes)

    def scores_of(some: Tensor) -> Tensor:
        return attention_scores(
            some, slots, observed.scaling, observed.softcap, None, observed.slopes
        )

    # Deviations from the mean query's scores, not raw scores: their squares stay small.
    dtype = compute_dtype(queries.dtype)
    mean = torch.einsum("bhqd,bq->bhd", queries.to(dtype), weights.to(dtype))
    centre = scores_of(mean.unsqueeze(2)).squeeze(3)
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    start = first_counted(weights)
    queries, weights = queries[:, :, start:], weights[:, start:]
    for rows in query_blocks(queries, slots.count):
        away = scores_of(queries[:, :, rows]) - centre.unsqueeze(3)
        share = weights[:, rows].to(away.dtype)
        first += torch.einsum("bhgqs,bq->bhgs", away, share)
        second += torch.einsum("bhgqs,bq->bhgs", away.square(), share)
    return centre + first + (second - first.square()) / 2
