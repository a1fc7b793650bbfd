"""SubGen (ClusterGen) Algorithm 1: a reservoir for the numerator, clusters for the denominator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.sketches.base import Sketch, token_bytes
from kvsketch.methods.sketches.cluster_samples import ClusterSamples
from kvsketch.slots import Slots, compute_dtype
from kvsketch.theory.low_dimension import UNIT_BALL_DELTA, low_dimensional


class SubGen(ClusterSamples):
    """SubGen, called ClusterGen in its later version: Algorithm 1 as written.

    The numerator uses s i.i.d. samples of the tokens with probability proportional to ``|v|^2``
    (UpdateMatrixProduct, Lemma 1), which become slots (k, mu/(s|v|^2) v, 0). (One sentence of the
    paper says ``|k|^2``, but the algorithm and the lemma say ``|v|^2``.) The denominator uses
    online clusters of the keys of radius delta, each with t i.i.d. uniform samples of its keys
    (Lemma 2), which become slots (k, 0, n_i/t). QueryStreamAttn is ``attend`` over both. The paper
    has no 1/sqrt(d) in the scores. Here, the scaling is an argument of ``attend``.

    Bound (Theorem 1), with ``kvsketch.theory.subgen`` for s and t: error at most
    eps |softmax(Kq)|_2 |V|_op with probability 0.99, in O(d (m t + s)) memory.

    Args:
        delta: radius of a cluster, > 0, in units of the keys. None: the smallest distance among the
            first keys, widened as needed.
        s: numerator samples, >= 1.
        t: samples per cluster, >= 1.
        max_clusters: the largest number of clusters per head. None (the paper): as many as the keys
            need.
        overflow: what happens if a key needs one more cluster. "widen": delta is doubled in that
            head, and its clusters are clustered again. "nearest": the key joins the nearest cluster
            and is counted in ``overflowed``. "error": InputError, and nothing changes.
        seed: of every random choice.

    Raises:
        InputError: an argument out of range.
    """

    name = "subgen"
    least_slots = 2
    paper = "Zandieh et al., SubGen Algorithm 1 (2402.06082); ClusterGen"
    guarantee = (
        "Theorem 1, at the sizes that kvsketch.theory.subgen calculates: error at most "
        "eps |softmax(Kq)|_2 |V|_op with probability 0.99"
    )

    def __init__(
        self,
        delta: float | None = None,
        s: int = 256,
        t: int = 4,
        max_clusters: int | None = None,
        overflow: str = "widen",
        seed: int = 0,
    ) -> None:
        self.s = at_least("s", s, 1)
        super().__init__(delta, t, max_clusters, overflow, seed)

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> SubGen:
        """A sketch of at most ``slots`` slots (at least 2): half of them for the numerator, half
        for clusters of t = 2 samples. The delta is adapted to the keys."""
        t = options.get("t", 2 if slots >= 8 else 1)
        s = options.get("s", max(1, slots // 2))
        cap = max(1, (slots - s) // t)
        return cls(**{"s": s, "t": t, "max_clusters": cap, **options}, seed=seed)

    def most_bytes(self, token: Slots) -> int | None:
        """With ``max_clusters``, the bytes of the clusters and of the numerator's samples."""
        clusters = super().most_bytes(token)
        return None if clusters is None else clusters + self.s * token_bytes(token) + 8

    def widen(self, like: Sketch) -> None:
        """As ``Sketch.widen``. An added sample starts as a copy of an older one. Its distribution
        is correct from the start (Lemma 1), but it becomes independent only by later tokens."""
        super().widen(like)
        assert isinstance(like, SubGen)
        if like.s > self.s and self.state:
            number = torch.arange(like.s, device="cpu") % self.s
            samples = self.get("sample")
            self.put("sample", samples.map(lambda t: t[:, :, number.to(t.device)].contiguous()))
        self.s = max(self.s, like.s)

    @classmethod
    def for_ball(
        cls,
        d: int,
        r: float,
        eps: float,
        failure: float = 0.01,
        value_dim: int | None = None,
        radius: float = 1.0,
        seed: int = 0,
    ) -> SubGen:
        """A sketch for few dimensions, which needs no assumption about clusters (Theorem 15 of
        Compression Barriers).

        Balls of radius delta = (e/3) radius around the representatives cover all keys, and there
        are never more of them than ``theory.clusters_in_ball``. s and t come from
        ``theory.low_dimensional``. The error is at most eps |softmax(Kq)|_2 |V|_op with probability
        1 - failure for one query of norm at most r (scaling included), in ``s + t * max_clusters``
        slots for a stream of any length. (A merge may double the radius of the clusters, for which
        r must be doubled.)

        Args:
            radius: bound on the norms of the keys. Keys beyond it do not affect the guarantee, but
                if they need more clusters than fit into the ball, ``extend`` raises InputError.
            others: as for ``theory.low_dimensional``.

        Raises:
            InputError: an argument out of range.
        """
        size = low_dimensional(eps, r, d, failure, value_dim, radius)
        delta = UNIT_BALL_DELTA * radius
        return cls(delta, size.s, size.t, size.clusters, "error", seed)

    def _start(self, new: Slots, live: Tensor) -> None:
        super()._start(new, live)
        self.state["mu"] = live.new_zeros(live.shape[:2], dtype=torch.float64)
        blank = Slots(new.keys, new.values, positions=new.positions).narrow(0, 1)
        index = torch.zeros(*live.shape[:2], self.s, dtype=torch.int64, device=live.device)
        self.put("sample", blank.take(index).map(torch.zeros_like))

    def _sample(self, new: Slots, weight: Tensor) -> None:
        # For a chunk of total weight c after mu, each sample is replaced with probability
        # c / (mu + c) by a draw in proportion to weight: the law of the loop in lines 24-26.
        weight = weight * new.values.double().square().sum(-1)
        upper = weight.cumsum(-1)
        total = upper[..., -1:]
        mu = self.state["mu"].unsqueeze(-1)
        at = self.random(self.s) * (mu + total) - mu
        hit = (at >= 0) & (total > 0)
        # Rounding must not select a token after the last one that has a weight.
        final = torch.where(weight > 0, torch.arange(weight.shape[2], device=mu.device), 0).amax(-1)
        chosen = torch.searchsorted(upper, at.contiguous(), right=True)
        chosen = torch.minimum(chosen, final.unsqueeze(-1))
        rows = torch.arange(weight.shape[0] * weight.shape[1], device=mu.device).view(mu.shape)
        target = hit.flatten().nonzero().squeeze(1)
        source = (chosen + rows * weight.shape[2])[hit]
        self._write("sample", target, new, source)
        self.state["mu"] = self.state["mu"] + total.squeeze(-1)

    def _merge(self, other: ClusterSamples) -> None:
        assert isinstance(other, SubGen)
        super()._merge(other)
        mine, theirs = self.state["mu"].unsqueeze(-1), other.state["mu"].unsqueeze(-1)
        hit = self.random(self.s) * (mine + theirs) >= mine
        target = (hit & (theirs > 0)).flatten().nonzero().squeeze(1)
        self._write("sample", target, other.get("sample"), target)
        self.state["mu"] = self.state["mu"] + other.state["mu"]

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        samples, clusters = self.get("sample"), self.get("cluster")
        norms = samples.values.double().square().sum(-1)
        weight = self.state["mu"].unsqueeze(-1) / (self.s * norms)
        weight = torch.where(norms > 0, weight, 0.0).unsqueeze(-1)
        dtype = compute_dtype(samples.values.dtype)
        numerator = Slots(
            samples.keys,
            (samples.values.to(dtype) * weight.to(dtype)).to(samples.values.dtype),
            torch.zeros_like(norms, dtype=dtype),
            samples.positions,
        )
        mass = (self.state["count"] / self.t).repeat_interleave(self.t, dim=-1)
        width = samples.values.shape[3]
        denominator = Slots(
            clusters.keys,
            clusters.values.new_zeros(*clusters.keys.shape[:3], width),
            mass.to(dtype),
            clusters.positions,
        )
        return Slots.cat([numerator, denominator])


class SubGenCoupled(ClusterSamples):
    """SubGen with numerator and denominator from the same samples. Ours, not the paper's.

    The t samples of a cluster keep their values and become slots (k, (n_i/t) v, n_i/t). Both sums
    are unbiased, and the output is a weighted mean of values, so that it stays in their convex
    hull, whereas the output of Algorithm 1, from separate samples, can be wrong by any factor.
    There is no l2 reservoir, so that Theorem 1 does not hold for the numerator.

    Args:
        delta: as for ``SubGen``.
        t: samples per cluster, >= 1.
        max_clusters: as for ``SubGen``.
        overflow: as for ``SubGen``.
        seed: of every random choice.
    """

    name = "subgen_coupled"
    paper = "ours, after SubGen Algorithm 1 (2402.06082)"
    guarantee = "numerator and denominator are unbiased"
    keeps_values = True

    @classmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> SubGenCoupled:
        """A sketch of at most ``slots`` clusters of one sample each. The delta is adapted to the
        keys."""
        t = options.get("t", 1)
        return cls(**{"t": t, "max_clusters": max(1, slots // t), **options}, seed=seed)

    @property
    def slots(self) -> Slots:
        self._require_tokens()
        clusters = self.get("cluster")
        mass = (self.state["count"] / self.t).repeat_interleave(self.t, dim=-1)
        mass = mass.to(compute_dtype(clusters.values.dtype))
        return Slots(clusters.keys, clusters.values, positions=clusters.positions).scaled(mass)
