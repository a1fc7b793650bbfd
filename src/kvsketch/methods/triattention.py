"""TriAttention: keys that the mean query would attend to from many later positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import check_queries
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.rotation import Turn
from kvsketch.methods.scoring import Scoring, blended, first_counted, query_weights
from kvsketch.observed import Observed
from kvsketch.slots import Slots, compute_dtype

_AGGREGATIONS = ("mean", "max")


class TriAttention(Scoring):
    """Keep the keys of the highest score for queries before RoPE that are distributed as those seen
    so far, averaged over future positions.

    The paper's score of a key k, d positions before a query, with w_f the frequency and q_f, k_f
    the f-th pair of channels before RoPE: sum_f |E q_f| |k_f| cos(w_f d + arg E q_f - arg k_f) +
    sum_f (E |q_f| - |E q_f|) |k_f|. The first sum is the product of k after RoPE with the mean
    query before RoPE, rotated to its position, so that no positions of keys are needed, only how
    far the queries are from the end. Scores are averaged over queries 1, 2, 4 and so on up to
    ``farthest`` positions after the next token, or their largest is taken. Those of every query
    head are standardised to mean 0 and deviation 1 over the slots, and the largest of the query
    heads of a KV head counts, as in the authors' code with ``per_layer_perhead_pruning`` (given the
    same statistics, the same tokens are kept).

    Where it differs: the authors measure E q_f and E |q_f| beforehand on other texts. Here they are
    those of the last ``window`` queries, which are rotated back; no file is needed. Later queries
    update the score: with q < ``window`` of them, the old score has weight (1 - 1/window)^q and the
    score by the new queries the rest; new slots get the latter. The authors never compress a prompt
    unless told (``allow_prefill_compression``), and their default keeps the same tokens in all
    layers. Channels that RoPE does not rotate, which their code does not handle, count as rotated
    by frequency 0, each by itself.

    It needs the frequencies of the model's rotary embedding, which ``SketchCache`` passes to it;
    models with other positions are refused by name. Without a cache: set ``turn``.

    Args:
        window: number of last queries for E q_f and E |q_f|, >= 1; all queries if there are fewer.
        farthest: the largest number of positions, >= 1; of the numbers 1, 2, 4 and so on those that
            are not larger count.
        aggregation: over future positions, "mean" or "max".

    Raises:
        InputError: an argument out of range.
    """

    name = "triattention"
    paper = "Mao et al., TriAttention: Trigonometric KV Compression (2604.04921)"
    requires = Requirements(queries=True, values=False, rotary=True)
    window: int

    def __init__(
        self, window: int = 512, farthest: int = 65536, aggregation: str = "mean", seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)
        self.farthest = at_least("farthest", farthest, 1)
        if aggregation not in _AGGREGATIONS:
            raise InputError(f"aggregation={aggregation!r} must be one of {_AGGREGATIONS}")
        self.aggregation = aggregation

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        check_queries(observed.queries, slots, observed.slopes)
        turn = self._checked_turn(slots)
        weights, fade = query_weights(observed, self.window)
        mean, length = statistics(observed, weights, turn)
        steps = 2 ** torch.arange(self.farthest.bit_length(), device=mean.device)
        future = turn(mean.unsqueeze(2), steps)
        if self.aggregation == "mean":
            future = future.mean(2, keepdim=True)
        keys = slots.keys.to(mean.dtype)
        batch, heads, n = keys.shape[:3]
        met = (future.reshape(batch, heads, -1, keys.shape[3]) @ keys.mT).view(
            batch, heads, -1, future.shape[2], n
        )
        spread = (length - turn.norms(mean)).view(batch, heads, -1, length.shape[-1])
        score = _standard(met.amax(3) + spread @ turn.norms(keys).mT, slots.live()).amax(2).float()
        return blended(score, slots, observed, fade)

    def _checked_turn(self, slots: Slots) -> Turn:
        turn, dim = self.turn, slots.keys.shape[-1]
        if turn is None:
            raise InputError(
                f"{self.name} needs the frequencies of the model's rotary embedding: SketchCache "
                "passes them at the first forward; without a cache, set the compressor's `turn`, "
                "a kvsketch.methods.rotation.Turn"
            )
        if not 2 <= 2 * len(turn.frequencies) <= dim:
            raise InputError(
                f"turn has {len(turn.frequencies)} frequencies, which do not fit keys of {dim}"
            )
        return turn


def statistics(observed: Observed, weights: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """The mean of the queries as if all were those of the position after the newest token, and the
    mean lengths of their pairs of channels (``Turn.norms``).

    Args:
        weights: float ``[batch, q]``; queries whose weight is not 0 count equally.

    Returns:
        Both at least float32, ``[batch, num_attention_heads, head_dim]`` and
        ``[batch, num_attention_heads, pairs + channels not rotated]``.
    """
    queries, live = observed.queries, observed.live
    if live is None:
        live = torch.ones(len(queries), queries.shape[2], dtype=torch.bool, device=queries.device)
    start = first_counted(weights)
    to_the_end = live.long().flip(-1).cumsum(-1).flip(-1)[:, None, start:]
    share = (weights[:, start:] != 0).to(compute_dtype(queries.dtype))
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    queries = queries[:, :, start:].to(share.dtype)
    mean = torch.einsum("bhqd,bq->bhd", turn(queries, to_the_end), share)
    return mean, torch.einsum("bhqf,bq->bhf", turn.norms(queries), share)


def _standard(score: Tensor, live: Tensor | None) -> Tensor:
    """``[batch, heads, group, n]`` with mean 0 and deviation 1 over the live slots of each."""
    there = torch.ones_like(score) if live is None else live.unsqueeze(2).to(score.dtype)
    count = there.sum(-1, keepdim=True).clamp(min=1)
    away = (score - (score * there).sum(-1, keepdim=True) / count) * there
    return away / (away.square().sum(-1, keepdim=True) / count).sqrt().clamp(min=1e-6)
