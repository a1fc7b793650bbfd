"""Sliding window attention with unmasked values, exactly and by the paper's sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import attend, attention_scores
from kvsketch.methods.sketches.base import Sketch, token_bytes
from kvsketch.slots import Slots, compute_dtype


class SlidingWindow(Sketch):
    """The last W tokens exactly, and one slot for all tokens before them.

    Attention as in "Compression Barriers", equation 20: a key outside the window counts as 0 (its
    score is 0), its value is not masked. All tokens outside therefore have the same weight, and
    together they are the slot k = 0, u = sum of their values, m = i - W. Where Algorithm 1 samples
    one of them, this running sum is exact: zero variance, no random number drawn.

    O(d W) memory per KV head, the order Theorem 26 proves necessary. The sum is kept in float64.
    With ALiBi the outside slot has position 0, so that its score is no longer 0.

    Args:
        window: W, in live tokens of each row and head, >= 1.

    Raises:
        InputError: window < 1.
    """

    name = "sliding_window"
    paper = "Haris and Onak, Compression Barriers, equation 20"
    guarantee = "exact for the attention that equation 20 defines"
    randomised = False
    least_slots = 2

    def __init__(self, window: int, seed: int = 0) -> None:
        super().__init__(seed)
        self.window = at_least("window", window, 1)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> SlidingWindow:
        """``slots`` >= 2 slots per KV head, one of them for the outside."""
        at_least("slots", slots, 2)
        return cls(**{"window": slots - 1, **options}, seed=seed)

    def most_bytes(self, token: Slots) -> int:
        return self.window * token_bytes(token) + 8 * token.values.shape[3] + 16

    def widen(self, like: Sketch) -> None:
        """As ``Sketch.widen``: the window fills up before tokens leave it again."""
        assert isinstance(like, SlidingWindow)
        self.window = max(self.window, like.window)

    @property
    def slots(self) -> Slots:
        """The window, oldest token first, then the slot for the tokens outside (dead if no token
        has left the window yet). Values in at least float32."""
        self._require_tokens()
        window = self.get("window")
        mass = self._alive().to(compute_dtype(window.values.dtype))
        return Slots.cat([replace(window, mass=mass), self._outside_slots()])

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        tokens = replace(new, mass=None, score=None)
        if not self.state:
            self._begin(tokens)
        joined = Slots.cat([self.get("window"), tokens])
        if live is not None:  # the dead ones first: they leave, or fill up a short row
            alive = torch.cat([self._alive(), live], dim=-1)
            joined = joined.take(alive.byte().argsort(dim=-1, stable=True))
        self.state["count"] = self.state["count"] + (new.count if live is None else live.sum(-1))
        leaving = (self.state["count"] - self._outside() - self.window).clamp(min=0)
        self.state["outside"] = self._outside() + leaving
        surplus = max(0, joined.count - self.window)
        # clone: a view would keep the whole chunk alive
        self.put("window", joined.narrow(surplus, joined.count - surplus).map(torch.clone))
        if surplus:
            self._leave(joined.narrow(0, surplus), leaving)

    def _merge(self, other: SlidingWindow) -> None:
        # What is outside there lies between our window and theirs, which is full then: pushing it
        # in pushes all of ours out, as a single stream would have.
        full = other._alive().sum(-1) == other.window
        if bool(((other._outside() > 0) & ~full).any()):
            raise InputError(
                f"merge: the other sketch's window was made larger (window={other.window}) and is "
                "not full again yet"
            )
        self._extend(other.get("window"), other._alive())
        self._absorb(other)
        self.state["count"] = self.state["count"] + other._outside()
        self.state["outside"] = self._outside() + other._outside()

    def _begin(self, tokens: Slots) -> None:
        values = tokens.values[:, :, 0]
        self.state["count"] = torch.zeros_like(values[..., 0], dtype=torch.int64)  # live tokens
        self.state["outside"] = torch.zeros_like(self.state["count"])  # of those
        self.state["sum"] = torch.zeros_like(values, dtype=torch.float64)
        self.put("window", tokens.narrow(0, 0))

    def _alive(self) -> Tensor:
        """bool ``[batch, heads, slots in the window]``; a short row is dead at the front."""
        width = self.state["window.keys"].shape[2]
        column = torch.arange(width, device=self.state["count"].device)
        return column >= width - (self.state["count"] - self._outside()).unsqueeze(-1)

    def _outside(self) -> Tensor:
        """How many live tokens left the window, int64 ``[batch, heads]``."""
        return self.state["outside"]

    def _outside_slots(self) -> Slots:
        """The slots for the tokens outside."""
        return self._at_zero(self.state["sum"].unsqueeze(2), self._outside().unsqueeze(-1))

    def _leave(self, left: Slots, leaving: Tensor) -> None:
        """Take in what left the window: the last ``leaving`` slots of each row of ``left``; those
        before are dead (value 0). Counted already."""
        self.state["sum"] = self.state["sum"] + left.values.double().sum(2)

    def _absorb(self, other: SlidingWindow) -> None:
        """Take in what ``other`` has outside; not counted yet."""
        self.state["sum"] = self.state["sum"] + other.state["sum"]

    def _at_zero(self, values: Tensor, mass: Tensor) -> Slots:
        """Slots with key 0."""
        keys = self.state["window.keys"]
        dtype = compute_dtype(self.state["window.values"].dtype)
        zeros = keys.new_zeros(*mass.shape, keys.shape[3])
        return Slots(zeros, values.to(dtype), mass.to(dtype))


class SlidingWindowSampled(SlidingWindow):
    """Algorithm 1 of "Compression Barriers" as written: the last W tokens and uniformly sampled
    values from before them, one in each of ``samples`` independent reservoirs.

    Unbiased for :class:`SlidingWindow`'s exact output (Theorem 24). The reservoirs share the
    window, so the memory is O(d W + d samples); Theorem 25 boosts the estimate with one reservoir
    per draw, samples = T Q, and multiplies the two instead. Sketches to be merged need different
    seeds: equal ones make the same choices.

    Theorem 25 needs three repairs: its E[O^2] <= ||V||_inf E[O] holds for values >= 0 only
    (signed ones need T = 3 ||V||_inf^2 / (eps E[O])^2); the Chernoff bound
    Pr[X >= Q/2] <= e^(-Q/12) fails at Q = 100, where e^(-Q/36) (or Hoeffding's e^(-Q/18)) is
    true; it assumes a bound on Attn where it uses one on Attn_W. "Lines 22/23" and "24/25" of the
    proofs are lines 16 and 18.

    Args:
        window: W, in live tokens of each row and head, >= 1.
        samples: reservoirs, >= 1.

    Raises:
        InputError: window or samples < 1.
    """

    name = "sliding_window_sampled"
    paper = "Haris and Onak, Compression Barriers, Algorithm 1"
    guarantee = (
        "unbiased for the attention that equation 20 defines (Theorem 24); Theorem 25, as its "
        "docstring repairs it, with enough samples"
    )
    randomised = True

    def __init__(self, window: int, samples: int = 1, seed: int = 0) -> None:
        super().__init__(window, seed)
        self.samples = at_least("samples", samples, 1)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> SlidingWindowSampled:
        """``slots`` slots per KV head, ``samples`` (default 1) of them for the outside."""
        samples = at_least("samples", options.get("samples", 1), 1)
        at_least("slots", slots, samples + 1)
        return cls(**{"window": slots - samples, **options}, seed=seed)

    def most_bytes(self, token: Slots) -> int:
        value = token.values.shape[3] * token.values.element_size()
        return self.window * token_bytes(token) + self.samples * value + 16

    def sample(self, queries: Tensor, draws: int = 1, *, scaling: float | None = None) -> Tensor:
        """Outputs of lines 14 to 18: a value of the window in proportion to exp(score) with
        probability (S - i + W) / S, else a reservoir's; the exact attention (line 6) while
        nothing is outside.

        Draw t looks into reservoir ``t % samples``: at most ``samples`` draws are independent.
        Attention over ``slots`` is their mean given the reservoirs.

        Args:
            queries: ``[batch, num_attention_heads, q, head_dim]``.
            scaling: multiplies the scores; default ``head_dim ** -0.5`` (the paper has 1).

        Returns:
            ``[draws, batch, num_attention_heads, q, value_dim]`` in the dtype of the queries.

        Raises:
            InputError: draws < 1, an empty sketch, or queries that ``attend`` refuses.
        """
        at_least("draws", draws, 1)
        exact = attend(queries, self.slots, scaling=scaling)
        window, outside = self.get("window"), self._outside()
        scores = attention_scores(queries, window, scaling, None, None, None).flatten(2, 3).double()
        rest = outside.double().log()[..., None, None].expand(*scores.shape[:3], 1)
        chances = torch.cat([scores, rest], dim=-1).softmax(-1)
        self._renew()
        drawn = self.random(scores.shape[2], draws)
        index = torch.searchsorted(chances.cumsum(-1), drawn, right=True).clamp_(max=window.count)
        reservoir = torch.arange(draws, device=index.device) % self.samples
        index = torch.where(index == window.count, window.count + reservoir, index)
        pool = torch.cat([window.values, self.state["reservoir"]], dim=2)
        values = torch.take_along_dim(pool, index.flatten(2).unsqueeze(-1), dim=2)
        values = values.view(*exact.shape[:3], draws, -1).movedim(3, 0).to(queries.dtype)
        group = exact.shape[1] // outside.shape[1]
        sampled = (outside > 0).repeat_interleave(group, dim=1)[..., None, None]
        return torch.where(sampled, values, exact)

    def estimate(self, queries: Tensor, groups: int = 1, *, scaling: float | None = None) -> Tensor:
        """Theorem 25's median of means, one draw from every reservoir: the median of Q =
        ``groups`` means over T = samples / groups draws each.

        Returns:
            ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries.

        Raises:
            InputError: ``groups`` does not divide ``samples``, and as for ``sample``.
        """
        if self.samples % at_least("groups", groups, 1):
            raise InputError(f"groups={groups} must divide samples={self.samples}")
        drawn = self.sample(queries, self.samples, scaling=scaling).to(compute_dtype(queries.dtype))
        means = drawn.view(groups, -1, *drawn.shape[1:]).mean(1)
        return means.median(0).values.to(queries.dtype)

    def _begin(self, tokens: Slots) -> None:
        super()._begin(tokens)
        del self.state["sum"]
        shape = tokens.values.shape
        self.state["reservoir"] = tokens.values.new_zeros(*shape[:2], self.samples, shape[3])

    def _outside_slots(self) -> Slots:
        share = self._outside().double().unsqueeze(-1) / self.samples
        values = self.state["reservoir"].double() * share.unsqueeze(-1)
        return self._at_zero(values, share.expand(values.shape[:3]))

    def _leave(self, left: Slots, leaving: Tensor) -> None:
        # Line 13 for a whole chunk: of w + c tokens so far c are new, and a uniform draw among all
        # says both whether the reservoir changes (probability c / (w + c)) and to which.
        new = leaving.unsqueeze(-1)
        pick = (self._draw() * self._outside().unsqueeze(-1)).long()
        index = (left.count - new + pick).clamp_(0, left.count - 1)
        chosen = torch.take_along_dim(left.values, index.unsqueeze(-1), dim=2)
        replaced = (pick < new).unsqueeze(-1)
        self.state["reservoir"] = torch.where(replaced, chosen, self.state["reservoir"])

    def _absorb(self, other: SlidingWindow) -> None:
        mine, theirs = self._outside().unsqueeze(-1), other._outside().unsqueeze(-1)
        replaced = (self._draw() * (mine + theirs) < theirs).unsqueeze(-1)
        chosen = other.state["reservoir"]
        self.state["reservoir"] = torch.where(replaced, chosen, self.state["reservoir"])

    def _draw(self) -> Tensor:
        """A uniform number per reservoir."""
        return self.random(self.samples)
