"""Attention in O(sqrt n) memory when keys are scalars: extreme keys, a reservoir, lazy Gumbels."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import attention_scores, check_queries
from kvsketch.methods.sketches.base import Sketch, token_bytes
from kvsketch.slots import Slots, compute_dtype


class OneDimensional(Sketch):
    """Appendix E of "Compression Barriers" (head_dim 1; values may be wider): the k largest and
    k smallest keys exactly, and a uniform sample, without replacement, of the rest.

    For either sign of the query, the k highest scores are then known exactly. Up to 2k tokens, all
    are kept and everything is exact. After that, a token that leaves the 2k has k others on both
    sides and could never come back, so the kept ones are always the true extremes; it joins the
    rest, whose sample is the ``reservoir`` tokens of smallest random tag. k does not grow with the
    stream: it comes from a bound on its length, as in the paper. A longer stream stays correct,
    with k below sqrt(n). Memory is taken as tokens arrive.

    ``sample`` is Algorithm 2. A uniform m-subset of the reservoir is one of the rest, so each draw
    has exactly the softmax law, over sketch and draw together, as long as m <= R = ``reservoir``.
    The paper bounds m in expectation only. With N tokens in the rest,
    Pr[m > R] <= (N / (N + k))^(R + 1), about e^(-R / sqrt n) at k = sqrt n: R = sqrt n falls
    short in up to e^-1 of the draws (e^-2 at equal scores), R = sqrt(n) ln(1/delta) in up to delta
    of them. A draw that falls short is counted in ``shortfalls``, and each reservoir token stands
    for m / R tokens in it (approximate). Draws from one sketch share its reservoir: the paper's
    "boosted to arbitrary precision" needs independent sketches, and so does ``merge``: give
    them different seeds.

    Args:
        max_tokens: the length n the stream is sized for, >= 1.
        buffer: k, >= 1; default ``ceil(sqrt(max_tokens))``.
        reservoir: R, >= 1; default ``ceil(sqrt(max_tokens))``.

    Raises:
        InputError: an argument is not an int >= 1; ``extend`` with head_dim other than 1.
    """

    name = "one_dimensional"
    paper = "Haris and Onak, Compression Barriers, Appendix E"
    guarantee = "each draw of sample() has the softmax law while its reservoir suffices"
    least_slots = 3
    grows = False  # tokens that left the extremes or the sample do not return

    def __init__(
        self,
        max_tokens: int = 1 << 20,
        buffer: int | None = None,
        reservoir: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.max_tokens = at_least("max_tokens", max_tokens, 1)
        root = isqrt(max_tokens - 1) + 1
        self.buffer = at_least("buffer", root if buffer is None else buffer, 1)
        self.reservoir = at_least("reservoir", root if reservoir is None else reservoir, 1)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> OneDimensional:
        """``slots`` >= 3 slots per KV head, a third for each of the three parts."""
        k = at_least("slots", slots, 3) // 3
        return cls(**{"buffer": k, "reservoir": slots - 2 * k, **options}, seed=seed)

    def most_bytes(self, token: Slots) -> int:
        ends = 2 * self.buffer * token_bytes(token)
        return ends + self.reservoir * (token_bytes(token) + 8) + 8

    @property
    def slots(self) -> Slots:
        """The 2k extremes exactly, then the reservoir, which shares the mass of the rest equally:
        a self-normalised estimate without the noise of ``sample``'s draws, biased by O(1/R).
        Values in at least float32."""
        self._require_tokens()
        ends, rest = self.get("ends"), self.get("rest")
        dtype = compute_dtype(ends.values.dtype)
        ends = replace(ends, mass=self._alive("ends").to(dtype))
        rest = replace(rest, values=rest.values.to(dtype), score=None)
        share = self._outside().double() / self._sampled().clamp(min=1)
        return Slots.cat([ends, rest.scaled(share.unsqueeze(-1) * self._alive("rest"))])

    @property
    def shortfalls(self) -> int:
        """Draws so far, over all rows, heads and queries, that needed more than the reservoir."""
        return int(self.meta.get("shortfalls", 0))

    def sample(self, queries: Tensor, draws: int = 1, *, scaling: float | None = None) -> Tensor:
        """Values of tokens drawn from the softmax distribution by lazy Gumbel sampling.

        Algorithm 2, with one difference: the far end's k tokens are at hand anyway, so they get
        their Gumbels too and only the n - 2k of the rest are drawn lazily.

        Args:
            queries: ``[batch, num_attention_heads, q, 1]``.
            scaling: multiplies the scores; default ``head_dim ** -0.5`` = 1.

        Returns:
            ``[draws, batch, num_attention_heads, q, value_dim]`` in the dtype of the queries.

        Raises:
            InputError: draws < 1, an empty sketch, or queries that ``attend`` refuses.
        """
        at_least("draws", draws, 1)
        self._require_tokens()
        ends, rest = self.get("ends"), self.get("rest")
        both = Slots.cat([replace(rest, score=None), ends])  # rest first: its width may be 0
        check_queries(queries, both, None)
        scores = attention_scores(queries, both, scaling, None, None, None).flatten(2, 3).double()
        scores, lazy = scores[..., rest.count :], scores[..., : rest.count]
        self._renew()
        noise = self._random(draws, *scores.shape[2:]).log_().neg_().log_().neg_()  # Gumbel(0, 1)
        noisy = (scores + noise).masked_fill(~self._alive("ends").unsqueeze(2), -torch.inf)
        if rest.count:
            # Lines 3 and 4. All keys of the rest lie between the two inner ends, so that the higher
            # of their two scores is S_min of the query's side.
            inner = scores[..., self.buffer - 1 : self.buffer + 1].amax(-1)
            cutoff = noisy.amax(-1) - inner
            noisy = torch.cat([self._lazy_gumbels(lazy, cutoff), noisy], dim=-1)
        winner = noisy.argmax(-1).movedim(0, -1).flatten(2).unsqueeze(-1)
        values = torch.take_along_dim(both.values, winner, dim=2)
        values = values.view(*queries.shape[:3], draws, -1).movedim(3, 0)
        return values.to(queries.dtype)

    def estimate(self, queries: Tensor, draws: int = 1, *, scaling: float | None = None) -> Tensor:
        """The mean of ``draws`` draws, ``[batch, num_attention_heads, q, value_dim]``; unbiased
        but for ``shortfalls``. Raises as ``sample`` does."""
        drawn = self.sample(queries, draws, scaling=scaling)
        return drawn.to(compute_dtype(drawn.dtype)).mean(0).to(drawn.dtype)

    def _lazy_gumbels(self, scores: Tensor, cutoff: Tensor) -> Tensor:
        """Lines 5 and 6: ``scores`` (``[batch, heads, queries, reservoir]``) plus a Gumbel above
        ``cutoff`` (``[draws, batch, heads, queries]``) at m random places, -inf elsewhere."""
        above = -torch.expm1(-torch.exp(-cutoff))  # Pr[Gumbel > cutoff]
        number = self._outside().double()[..., None].expand_as(above)
        m = self._binomial(number, above)
        size = self._sampled()[..., None, None]
        m = m.long().unsqueeze(-1)
        self.meta["shortfalls"] = self.shortfalls + int((m > size).sum())
        order = self._random(len(cutoff), *scores.shape[2:])
        order = order.masked_fill(~self._alive("rest").unsqueeze(2), 2.0)
        rank = order.argsort(-1).argsort(-1)
        # m points spread over the reservoir as evenly as possible: at most one each if m <= R.
        size = size.clamp(min=1)
        copies = m // size + (rank < m % size)
        # The largest of c Gumbels above the cutoff: u^(1/c) is the largest of c uniform numbers,
        # and -log of a Gumbel's distribution function is an exponential variable.
        low = -torch.expm1(self._random(len(cutoff), *scores.shape[2:]).log() / copies)
        gumbel = -torch.log(-torch.log1p(-above.unsqueeze(-1) * low))
        return torch.where(copies > 0, scores + gumbel, -torch.inf)

    def _random(self, draws: int, *shape: int) -> Tensor:
        """``random`` for every draw, ``[draws, batch, heads, *shape]``."""
        return self.random(draws, *shape).movedim(2, 0)

    def _binomial(self, number: Tensor, chance: Tensor) -> Tensor:
        """Binomial numbers, ``[draws, batch, ...]``: the rows one by one, each with a generator of
        its own, since what a binomial number takes from it depends on its parameters."""
        drawn = []
        for row, key in enumerate(self.streams()[:, 0].tolist()):
            generator = torch.Generator().manual_seed(key)
            of_row = number[:, row].cpu(), chance[:, row].cpu()
            drawn.append(torch.binomial(*of_row, generator=generator))
        return torch.stack(drawn, dim=1).to(chance.device)

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        if new.keys.shape[3] != 1:
            raise InputError(f"head_dim={new.keys.shape[3]} must be 1 for {self.name!r}")
        tokens = replace(new, mass=None, score=None)
        if not self.state:
            self._begin(tokens)
        if live is None:
            live = torch.ones_like(tokens.keys[..., 0], dtype=torch.bool)
        alive = torch.cat([self._alive("ends"), live], dim=-1)
        joined = Slots.cat([self.get("ends"), tokens])
        key = joined.keys[..., 0].to(compute_dtype(joined.keys.dtype))
        order = key.masked_fill(~alive, torch.inf).argsort(
            dim=-1, stable=True
        )  # the dead ones last
        middle = (alive.sum(-1, keepdim=True) - 2 * self.buffer).clamp_(min=0)
        self.state["count"] = self.state["count"] + live.sum(-1)
        column = torch.arange(min(joined.count, 2 * self.buffer), device=order.device)
        self.put("ends", joined.take(order.gather(-1, column + middle * (column >= self.buffer))))
        if joined.count > 2 * self.buffer:
            left = joined.take(order[..., self.buffer : joined.count - self.buffer])
            tags = self.random(left.count)
            none = torch.arange(left.count, device=order.device) >= middle
            self._sample_from(replace(left, score=tags.masked_fill(none, torch.inf)))

    def _merge(self, other: OneDimensional) -> None:
        # The rest there has k extremes on both sides there, hence also in the union.
        self._extend(other.get("ends"), other._alive("ends"))
        if other.get("rest").count:
            self._sample_from(other.get("rest"))
        self.state["count"] = self.state["count"] + other._outside()

    def _begin(self, tokens: Slots) -> None:
        none = tokens.narrow(0, 0).map(torch.clone)
        self.state["count"] = none.keys.new_zeros(none.keys.shape[:2], dtype=torch.int64)
        self.put("ends", none)
        tags = none.keys.new_zeros(none.keys.shape[:3], dtype=torch.float64)
        self.put("rest", replace(none, score=tags))

    def _sample_from(self, more: Slots) -> None:
        """Keep the reservoir's share of it and of ``more``, both tagged by ``score``: the smallest
        tags are a uniform sample without replacement, also of merged streams."""
        pool = Slots.cat([self.get("rest"), more])
        assert pool.score is not None
        kept = pool.score.topk(min(self.reservoir, pool.count), largest=False)
        self.put("rest", pool.take(kept.indices))

    def _outside(self) -> Tensor:
        """How many live tokens are not among the 2k, int64 ``[batch, heads]``."""
        return (self.state["count"] - 2 * self.buffer).clamp(min=0)

    def _sampled(self) -> Tensor:
        """How many of those are in the reservoir, int64 ``[batch, heads]``."""
        return self._outside().clamp(max=self.reservoir)

    def _alive(self, part: str) -> Tensor:
        """bool ``[batch, heads, slots]``: short rows of both parts are dead at the end."""
        column = torch.arange(
            self.state[f"{part}.keys"].shape[2], device=self.state["count"].device
        )
        number = self._sampled() if part == "rest" else self.state["count"]
        return column < number.unsqueeze(-1)
