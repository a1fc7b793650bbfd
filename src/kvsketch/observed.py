"""Queries that a method may use when it compresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Observed:
    """Queries of the attention function, with the settings that turn them into scores.

    Either they belong to the newest tokens: query i of q attends to the slots up to and including
    number ``count - q + i`` (causal). Or they come after all slots (``after``) and attend to every
    one.

    Attributes:
        queries: ``[batch, num_attention_heads, q, head_dim]``.
        scaling: multiplies ``<q, k>``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        slopes: ``[num_attention_heads]``; adds ``slope * position`` to the scores (ALiBi).
        live: bool ``[batch, q]``, False for padding, and for queries that did not attend to exactly
            all tokens up to their own.
        sinks: ``[num_attention_heads]``: the logit of an attention sink in the softmax (gpt-oss),
            which takes a share of every query's attention and adds no value.
        weights: float32 ``[batch, q]``: weight of each query, in methods that weight the queries of
            a second reading; other methods ignore it.
        after: they come after all slots, like those of a second reading.
        total: for a second reading, float ``[batch, num_attention_heads, q]``: the log of the sum
            of exp(score) by which its scores are normalised, if the kernel has computed it (see
            ``reread``).
    """

    queries: Tensor
    scaling: float
    softcap: float | None = None
    slopes: Tensor | None = None
    live: Tensor | None = None
    sinks: Tensor | None = None
    after: bool = False
    weights: Tensor | None = None
    total: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scores are plain products of queries and keys."""
        return self.softcap is None and self.slopes is None

    def narrow(self, start: int, length: int) -> Observed:
        """``length`` queries from ``start`` on, as views."""
        live, weights = (
            None if t is None else t.narrow(1, start, length) for t in (self.live, self.weights)
        )
        total = None if self.total is None else self.total.narrow(2, start, length)
        queries = self.queries.narrow(2, start, length)
        return replace(self, queries=queries, live=live, weights=weights, total=total)

    def every(self, start: int, step: int) -> Observed:
        """Each ``step``-th query from ``start`` on, as views; only for queries ``after`` all
        slots."""
        live, weights = (
            None if t is None else t[:, start::step] for t in (self.live, self.weights)
        )
        queries = self.queries[:, :, start::step]
        return replace(self, queries=queries, live=live, weights=weights, total=None)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> Observed:
        """With ``fn``, which acts on axis 0, applied."""
        live, weights, total = (
            None if t is None else fn(t) for t in (self.live, self.weights, self.total)
        )
        return replace(self, queries=fn(self.queries), live=live, weights=weights, total=total)


def causal(num_queries: int, num_slots: int, device: torch.device) -> Tensor:
    """bool ``[1, 1, q, slots]``: the queries belong to the last q slots."""
    last = torch.arange(num_slots - num_queries, num_slots, device=device)
    return (torch.arange(num_slots, device=device) <= last[:, None])[None, None]
