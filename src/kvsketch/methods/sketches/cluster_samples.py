"""Online clusters of keys, with samples of each: the denominator of both forms of SubGen."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.methods.sketches.base import Sketch, lengthened, token_bytes
from kvsketch.methods.sketches.online_clusters import assign, within_cluster
from kvsketch.slots import Slots, compute_dtype

OVERFLOW = ("widen", "nearest", "error")
# The number of tokens that are clustered at a time.
_BLOCK = 512


class ClusterSamples(Sketch):
    """Base class of SubGen and its coupled form: online clusters of the keys, each with t i.i.d.
    uniform samples of its tokens (UpdateSoftmaxNormalizer, Algorithm 1 lines 11-22; Lemma 2).

    For rounding, see ``online_clusters.assign``. A merge assigns the other sketch's clusters by
    their representatives. Keys therefore lie within 2 delta of their representative after a merge
    or after ``overflow="widen"``, and else within delta. Representatives are always more than delta
    apart.
    """

    keeps_values: ClassVar[bool] = False  # whether the cluster samples carry values

    def __init__(
        self,
        delta: float | None = None,
        t: int = 4,
        max_clusters: int | None = None,
        overflow: str = "widen",
        seed: int = 0,
    ) -> None:
        if delta is not None and (
            isinstance(delta, bool)
            or not isinstance(delta, (int, float))
            or not math.isfinite(delta)
            or delta <= 0
        ):
            raise InputError(f"delta={delta!r} must be a finite number > 0 (a distance of keys)")
        if overflow not in OVERFLOW:
            raise InputError(f"overflow={overflow!r} must be one of {', '.join(OVERFLOW)}")
        if max_clusters is not None:
            at_least("max_clusters", max_clusters, 1)
        if delta is None and (max_clusters is None or overflow != "widen"):
            raise InputError(
                "delta=None (start small and widen) needs max_clusters and overflow='widen'"
            )
        self.delta = delta
        self.t = at_least("t", t, 1)
        self.max_clusters = max_clusters
        self.overflow = overflow
        super().__init__(seed)

    def _check(self) -> None:
        delta, count = self.state["delta"], self.state["count"]
        if not bool(((delta > 0) & delta.isfinite()).all()):
            raise InputError("delta must be finite and > 0")
        if not bool(((count >= 0) & count.isfinite()).all()):
            raise InputError("count must be finite and >= 0")

    @property
    def clusters(self) -> Tensor:
        """The number of clusters, int64 ``[batch, heads]``: m' of Theorem 1."""
        self._require_tokens()
        return (self.state["count"] > 0).sum(-1)

    @property
    def radius(self) -> Tensor:
        """The current delta (widened or not), float64 ``[batch, heads]``."""
        self._require_tokens()
        return self.state["delta"]

    def most_bytes(self, token: Slots) -> int | None:
        """With ``max_clusters``, the bytes of the samples, representatives and counts of that many
        clusters."""
        if self.max_clusters is None:
            return None
        sample = token_bytes(self._payload(token))
        wide = compute_dtype(token.keys.dtype).itemsize * token.keys.shape[3]
        return self.max_clusters * (self.t * sample + wide + 8) + wide + 16

    def widen(self, like: Sketch) -> None:
        assert isinstance(like, ClusterSamples)
        if self.max_clusters is not None and like.max_clusters is not None:
            self.max_clusters = max(self.max_clusters, like.max_clusters)

    @property
    def overflowed(self) -> Tensor:
        """The number of tokens without a cluster within delta or room for a new one
        (``overflow="nearest"``), int64 ``[batch, heads]``."""
        self._require_tokens()
        return self.state["overflowed"]

    def _extend(self, new: Slots, live: Tensor | None) -> None:
        batch, heads, count, _ = new.keys.shape
        alive = live if live is not None else new.keys.new_ones(batch, heads, count).bool()
        if "count" not in self.state:
            self._start(new, alive)
        for start in range(0, count, _BLOCK):
            length = min(_BLOCK, count - start)
            part = new.narrow(start, length)
            weight = alive.narrow(2, start, length).double()
            self._place(part, part.keys.to(self.state["origin"].dtype), weight, copies=1)
            if not self.keeps_values:
                self._sample(part, weight)

    def _sample(self, new: Slots, weight: Tensor) -> None:
        """UpdateMatrixProduct, which the coupled form does not have."""

    def _start(self, new: Slots, live: Tensor) -> None:
        batch, heads, _, dim = new.keys.shape
        dtype = compute_dtype(new.keys.dtype)
        first = new.keys[:, :, :_BLOCK].to(dtype)
        weight = live[:, :, :_BLOCK, None].to(dtype)
        # Keys are shifted by a point among them, because large norms would cost digits.
        self.state["origin"] = (first * weight).sum(2) / weight.sum(2).clamp(min=1)
        if self.delta is None:
            delta = _least_distance(first, live[:, :, :_BLOCK])
        else:
            delta = torch.full((batch, heads), float(self.delta), dtype=torch.float64, device="cpu")
        self.state["delta"] = delta.to(new.keys.device)
        self.state["count"] = first.new_zeros(batch, heads, 0, dtype=torch.float64)
        self.state["center"] = first.new_zeros(batch, heads, 0, dim)
        self.state["overflowed"] = live.new_zeros(batch, heads, dtype=torch.int64)
        self.put("cluster", self._payload(new).narrow(0, 0))

    def _payload(self, new: Slots) -> Slots:
        """The part of a token that a cluster sample stores: its key, and its value if coupled."""
        values = new.values if self.keeps_values else new.values[..., :0]
        return Slots(new.keys, values, positions=new.positions)

    def _place(self, new: Slots, points: Tensor, weight: Tensor, copies: int) -> None:
        """Put points into clusters and update the samples.

        Args:
            new: candidates for the samples, ``copies`` per point, ``[batch, heads, points * copies,
                ...]``: the token itself (1 copy), or the t samples of another cluster.
            points: the coordinates of the points, ``[batch, heads, points, head_dim]``.
            weight: float64 ``[batch, heads, points]``, the number of tokens that each point
                represents, 0 if there is no point.
        """
        batch, heads, count = weight.shape
        if not bool((weight > 0).any()):
            return
        rows = batch * heads
        origin = self.state["origin"].unsqueeze(2)
        flat = (points - origin).reshape(rows, count, -1)
        weights = weight.reshape(rows, count)
        cluster, is_new = self._assign(flat, weights)

        # Update counts and representatives.
        used = (self.state["count"] > 0).sum(-1).reshape(rows)
        self._grow(int((used + is_new.sum(1)).max()))
        before = self.state["count"].reshape(rows, -1)
        size = before.gather(1, cluster) + within_cluster(cluster, weights)
        self.state["count"] = before.scatter_add(1, cluster, weights).view(batch, heads, -1)
        center = self.state["center"].reshape(rows, -1, flat.shape[2])
        row, column = is_new.nonzero(as_tuple=True)
        center = center.index_put((row, cluster[row, column]), flat[row, column])
        self.state["center"] = center.view(batch, heads, *center.shape[1:])

        # Line 16: at its arrival a point of weight w takes each sample with probability
        # w / (size of the cluster with it). The result of the loop is the last point that did.
        chance = torch.where(weights > 0, weights / size.clamp(min=1), 0.0).unsqueeze(2)
        # Only heads with points use random numbers. Other heads may take part only because another
        # head of the batch widens or has more clusters.
        takes_part = (weight > 0).any(-1)
        hit = self.random(count, self.t, where=takes_part).flatten(0, 1) < chance
        r, c, j = hit.nonzero(as_tuple=True)
        target = (r * before.shape[1] + cluster[r, c]) * self.t + j
        last = torch.full((rows * before.shape[1] * self.t,), -1, device=c.device)
        last.scatter_reduce_(0, target, c, "amax")
        target = (last >= 0).nonzero().squeeze(1)
        source = last[target] if copies == 1 else last[target] * copies + target % self.t
        source = source + (target // (before.shape[1] * self.t)) * (count * copies)
        self._write("cluster", target, self._payload(new), source)

    def _assign(self, flat: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The clusters of points, with the policy for too many clusters."""
        rows = flat.shape[0]
        while True:
            used = (self.state["count"] > 0).sum(-1).reshape(rows)
            limit = self.max_clusters if self.max_clusters is not None else 1 << 60
            center = self.state["center"].reshape(rows, -1, flat.shape[2])
            delta = self.state["delta"].reshape(rows)
            found = assign(flat, weights > 0, center, used, delta, limit - used)
            if not bool(found.overflow.any()):
                return found.cluster, found.is_new
            if self.overflow == "error":
                raise InputError(
                    f"the keys need more than max_clusters={limit} clusters of radius "
                    f"delta={self.delta}; allowed policies instead of 'error': 'widen', 'nearest'"
                )
            if self.overflow == "nearest":
                known = torch.cat([center, flat.new_zeros(rows, flat.shape[1], flat.shape[2])], 1)
                r, c = found.is_new.nonzero(as_tuple=True)
                known[r, found.cluster[r, c]] = flat[r, c]
                own = known.gather(1, found.cluster.unsqueeze(2).expand_as(flat))
                away = (flat - own).square().sum(2) > delta.square().unsqueeze(1).to(flat.dtype)
                lost = (away & (weights > 0) & found.overflow.unsqueeze(1)).sum(1)
                self.state["overflowed"] = self.state["overflowed"] + lost.view(
                    self.state["overflowed"].shape
                )
                return found.cluster, found.is_new
            self._widen(2 * self.state["delta"], found.overflow.view(self.state["delta"].shape))

    def _widen(self, delta: Tensor, heads: Tensor) -> None:
        """Cluster the clusters of some heads (bool ``[batch, heads]``) again with a larger delta
        (the doubling idea of Charikar et al., which SubGen cites): the policy
        ``overflow="widen"``."""
        count, center, samples = self.state["count"], self.state["center"], self.get("cluster")
        self.state["delta"] = torch.where(heads, delta, self.state["delta"])
        left = count.masked_fill(heads.unsqueeze(-1), 0.0)
        most = int((left > 0).sum(-1).max())  # cloned because clusters are written in place
        self.state["count"] = left[..., :most].clone()
        self.state["center"] = center[..., :most, :].clone()
        self.put("cluster", samples.narrow(0, most * self.t).map(torch.clone))
        if count.shape[2]:
            points = center + self.state["origin"].unsqueeze(2)
            self._absorb(points, count * heads.unsqueeze(-1), samples)

    def _absorb(self, centers: Tensor, counts: Tensor, samples: Slots) -> None:
        """Add whole clusters, the oldest first."""
        for start in range(0, counts.shape[2], _BLOCK):
            length = min(_BLOCK, counts.shape[2] - start)
            self._place(
                samples.narrow(start * self.t, length * self.t),
                centers.narrow(2, start, length),
                counts.narrow(2, start, length),
                copies=self.t,
            )

    def _merge(self, other: ClusterSamples) -> None:
        delta = torch.maximum(self.state["delta"], other.state["delta"])
        larger = delta > self.state["delta"]
        if bool(larger.any()):
            self._widen(delta, larger)
        self._absorb(
            other.state["center"] + other.state["origin"].unsqueeze(2),
            other.state["count"],
            other.get("cluster"),
        )
        self.state["overflowed"] = self.state["overflowed"] + other.state["overflowed"]

    def _grow(self, clusters: int) -> None:
        """Make room for ``clusters`` clusters per head, plus an eighth."""
        have = self.state["count"].shape[2]
        if clusters <= have:
            return
        extra = max(clusters, have + have // 8) - have
        if self.max_clusters is not None:
            extra = min(extra, self.max_clusters - have)
        self.state["count"] = lengthened(self.state["count"], extra)
        self.state["center"] = lengthened(self.state["center"], extra)
        self.put("cluster", self.get("cluster").map(lambda x: lengthened(x, extra * self.t)))

    def _write(self, prefix: str, target: Tensor, new: Slots, source: Tensor) -> None:
        """Put rows ``source`` of ``new`` in the place of rows ``target`` of stored slots, in a copy
        of these: a later block may still fail, and what was made in ``torch.inference_mode()``
        cannot be changed outside of it. Rows are numbered over batch x heads x slots."""
        stored = self.get(prefix)
        incoming = new.tensors()
        fields = {}
        for name, tensor in stored.tensors().items():
            rows = incoming[name].flatten(0, 2)[source]
            fields[name] = tensor.flatten(0, 2).index_put((target,), rows).view(tensor.shape)
        self.put(prefix, Slots(**fields))


def _least_distance(keys: Tensor, live: Tensor) -> Tensor:
    """The smallest positive distance between two of the keys, float64 ``[batch, heads]``, or a
    number that is small relative to their norm if all are equal."""
    distance = torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist").double()
    paired = live.unsqueeze(-1) & live.unsqueeze(-2) & (distance > 0)
    least = distance.masked_fill(~paired, torch.inf).amin((-2, -1))
    norm = keys.double().norm(dim=-1).amax(-1)
    return torch.where(torch.isinf(least), 1e-6 * norm + 1e-12, least)
