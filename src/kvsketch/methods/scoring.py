"""Shared by methods that need queries: scores from observed queries; the highest are kept."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.estimator import attention_received, check_queries
from kvsketch.kernels import cpu
from kvsketch.methods.base import Compressor, keep_top
from kvsketch.methods.requirements import Requirements
from kvsketch.observed import Observed
from kvsketch.slots import Slots, compute_dtype


class Scoring(Compressor):
    """Base class of the methods that keep the slots of highest score; a subclass defines
    ``scores``. Scores are stored with their slots."""

    requires = Requirements(queries=True)
    ragged = True
    keeps_tokens = True

    @abstractmethod
    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        """Scores of all slots after these queries, float32 ``[batch, num_key_value_heads, n]``.

        Args:
            slots: ``[batch, num_key_value_heads, n, ...]``; ``score`` is the score by earlier
                queries, 0 for slots that are new, None if there were no earlier queries.
            observed: queries of the newest tokens.
        """

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            score_of(slots, self.name)  # raises
            return slots
        return replace(slots, score=self.scores(slots, observed))

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        return keep_top(slots, score_of(slots, self.name), budget)


def score_of(slots: Slots, name: str) -> Tensor:
    """Their score.

    Raises:
        InputError: they have none, because no queries were observed.
    """
    if slots.score is None:
        raise InputError(f"{name} needs queries: pass observed=Observed(queries, scaling)")
    return slots.score


def query_weights(observed: Observed, window: int) -> tuple[Tensor, Tensor]:
    """How much each query counts in an average over about the last ``window`` ones.

    Returns:
        weights, float32 ``[batch, q]``: 1/window for each of a row's last ``window`` live queries;
        with fewer live ones, (1 - 1/window)^(live queries after it) / window. All queries after all
        slots count equally: 1/window. fade, float32 ``[batch, 1, 1]``: the factor of an earlier
        score, 0 once the window is full; 1 for queries after all slots.
    """
    queries = observed.queries
    if observed.live is None:
        live = queries.new_ones(queries.shape[0], queries.shape[2], dtype=torch.float32)
    else:
        live = observed.live.float()
    if observed.after:
        return live / window, live.new_ones(len(live), 1, 1)
    newer = live.flip(-1).cumsum(-1).flip(-1) - live
    count = live.sum(-1, keepdim=True)
    full = count >= window
    keep = 1 - 1 / window
    weights = torch.where(full, (newer < window).float(), keep**newer) * live / window
    fade = torch.where(full, 0.0, keep**count)
    return weights, fade.unsqueeze(-1)


def first_counted(weights: Tensor) -> int:
    """The first query that has a weight in any row; q if none has. Earlier ones affect no row."""
    counted = (weights != 0).any(0).nonzero()
    return int(counted[0]) if len(counted) else weights.shape[1]


def blended(score: Tensor, slots: Slots, observed: Observed, fade: Tensor) -> Tensor:
    """A new score and, weighted by ``fade``, the one before, which new slots do not have."""
    if slots.score is None:
        return score
    old = slots.count - observed.queries.shape[2]
    blend = slots.score * fade + score * (1 - fade)
    return torch.cat([blend[..., :old], score[..., old:]], dim=-1)


def recent_attention(slots: Slots, observed: Observed, window: int) -> tuple[Tensor, Tensor]:
    """Attention each slot received on average from the last ``window`` queries.

    Each query attends to the slots up to its own (causal); a slot of mass m receives m exp(score) /
    total. Only a block of queries x slots is formed at a time.

    Returns:
        The average over queries (``query_weights``) and over the query heads of each KV head,
        float32 ``[batch, num_key_value_heads, slots]``; and the weight that an earlier score
        keeps, ``[batch, 1, 1]``.

    Raises:
        InputError: queries that do not fit the keys.
    """
    check_queries(observed.queries, slots, observed.slopes)
    weights, fade = query_weights(observed, window)
    start = first_counted(weights)
    if start == weights.shape[1]:
        return weights.new_zeros(slots.keys.shape[:3]), fade
    live = None if observed.live is None else observed.live[:, start:]
    late = replace(observed, queries=observed.queries[:, :, start:], live=live)
    group = observed.queries.shape[1] // slots.keys.shape[1]
    found = cpu.received(slots, late, weights[0, start:] / group)
    if found is None:  # keys are converted once, and not for every block of queries
        slots = replace(slots, keys=slots.keys.to(compute_dtype(slots.keys.dtype)))
        found = attention_received(slots, late, weights[:, start:]).float() / group
    return found, fade
