"""Keep the heavy tokens, merge the rest. Ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError, at_least
from ..slots import Observed, Slots, attention_scores, check_queries, compute_dtype, per_group
from .base import Compressor
from .clustering import check_pairs, group
from .groups import Groups, merge
from .snapkv import recent_attention, scored_before

# Weight of an unattended token beside one of average attention: it should pull a little.
_FLOOR = 1e-3
# Scores of a few decoded queries: 8 MB in float32.
_FEW_SCORES = 1 << 21
# Fewer queries are decoded ones, and too few to fit anything to.
_LEAST_QUERIES = 16
# A corrected mass may not fall below this share of what it was.
_LEAST_MASS = 0.1


@dataclass(frozen=True)
class _Seen:
    """The last prompt queries, to correct the slots by.

    Attributes:
        queries: ``[R, q, head_dim]``, scaling folded in.
        log_total: ``[R, q]``, log of the sum of exp(score) m over all slots, and of a sink;
            infinity for a query that counts for nothing (padding).
    """

    queries: Tensor
    log_total: Tensor


class HeavyMerge(Compressor):
    """A share of the budget keeps the most attended tokens as they are; the rest is grouped by
    rounds of merging the closest (``closest.group_closest``; weighted by the root of attention),
    and each group becomes one slot.

    Attention is that of the last ``window`` queries, fading as queries come (``SnapKV``'s, without
    pooling); a token is as heavy as its attention times the norm of its value. A group's slot is
    (mean key, mass times mean value, mass), the means weighted by attention.

    With ``correct``, u and m of the slots are then fitted to the prompt's own last queries: ridge
    least squares on what the compressed tokens gave to numerator and denominator, by Cholesky in
    the space of queries. A head takes the fit only if it lowers the error on queries left out of
    it. Not with soft-capping or ALiBi, and not while decoding.

    Args:
        share: of the budget that keeps heavy tokens, in [0, 1).
        window: queries that vote, >= 1.
        steps: Lloyd iterations, >= 1, where k-means groups the keys instead: with ``pairs`` 0, or
            where too many costs are equal.
        correct: fit u and m where queries are known.
        ridge: of the fit, relative to the mean diagonal, > 0.
        pairs: the share of the slots that goes in a round, in (0, 1/2]; 0: k-means.
        second_order: multiply u and m of a group by what its spread adds to exp(score)
            (``gaussian_factor``) where queries are known. Off: it does not help.
        seed: unused; there is no randomness.

    Raises:
        InputError: an argument out of range.
    """

    name = "heavy_merge"
    paper = "ours"
    needs_queries = True
    allocation = "measured"
    window: int

    def __init__(
        self,
        share: float = 0.25,
        window: int = 64,
        steps: int = 5,
        correct: bool = True,
        ridge: float = 0.1,
        pairs: float = 0.25,
        second_order: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if not 0 <= share < 1:
            raise InputError(f"share={share!r} must lie in [0, 1)")
        if not ridge > 0:
            raise InputError(f"ridge={ridge!r} must be > 0")
        self.share, self.correct, self.ridge = share, correct, ridge
        self.window = at_least("window", window, 1)
        self.steps = at_least("steps", steps, 1)
        self.pairs = check_pairs(pairs)
        self.second_order = second_order
        self._fits = correct or second_order  # to the prompt's own queries
        self._seen: _Seen | None = None

    def reset(self) -> None:
        self._seen = None

    def tensors(self) -> list[Tensor]:
        return [] if self._seen is None else [self._seen.queries, self._seen.log_total]

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            return scored_before(slots, self.name)
        # Once, not in every block of queries.
        full = replace(slots, keys=slots.keys.to(compute_dtype(slots.keys.dtype)))
        received, fade = _decoded_attention(full, observed, self.window)
        if slots.score is not None:
            received = received + slots.score * fade
        self._seen = self._remember(full, observed) if self._fits else None
        return replace(slots, score=received)

    def compress(self, slots: Slots, budget: int) -> Slots:
        seen, self._seen = self._seen, None
        if budget == 0:
            return slots.narrow(0, 0)
        batch, heads, n = slots.keys.shape[:3]
        score = scored_before(slots, self.name).score
        assert score is not None
        live = slots.live()
        wide = compute_dtype(slots.values.dtype)
        norm = torch.linalg.vector_norm(slots.mean_values(), dim=-1, dtype=wide)
        weight = score.masked_fill(~live, -1.0) if live is not None else score
        heavy = min(budget - 1, round(self.share * budget))
        order = (weight * norm).masked_fill(weight < 0, -1.0).argsort(-1, descending=True)
        first = order[..., :heavy].sort(-1).values
        others = order[..., heavy:].sort(-1).values
        rest = slots.take(others)
        pull = weight.gather(-1, others).clamp(min=0.0)
        pull = pull + _FLOOR * (pull.mean(-1, keepdim=True) + 1e-12) * rest.masses()
        if live is not None:
            pull = pull * live.gather(-1, others)
        dtype = compute_dtype(slots.keys.dtype)
        flat = pull.reshape(batch * heads, -1).to(dtype)
        keys = rest.keys.reshape(batch * heads, n - heavy, -1).to(dtype)
        values = rest.mean_values().reshape(batch * heads, n - heavy, -1).to(dtype)
        # Attention differs by orders of magnitude and only guesses at that of later queries.
        price = flat.sqrt()
        groups = group(keys, values, flat, price, budget - heavy, self.steps, self.pairs)
        factor = None
        if self.second_order and seen is not None:
            factor = gaussian_factor(groups, keys, rest.masses().flatten(0, 1), flat, seen.queries)
        merged = merge(rest, groups, flat, attended=True, factor=factor)
        kept = Slots.cat([slots.take(first), merged])
        return self._corrected(kept, slots, seen) if self.correct and seen is not None else kept

    def _remember(self, slots: Slots, observed: Observed) -> _Seen | None:
        """The last ``window`` queries, if they are a prompt's and scores are plain products."""
        if not observed.plain or observed.queries.shape[2] < _LEAST_QUERIES:
            return None
        queries = observed.queries[:, :, -self.window :]
        batch, _, q, dim = queries.shape
        rows = batch * slots.keys.shape[1]
        scores = attention_scores(queries, slots, observed.scaling, None, None, None)
        if slots.mass is not None:
            scores += slots.mass.to(scores.dtype).log()[:, :, None, None]
        hidden = torch.ones(q, slots.count, dtype=torch.bool, device=scores.device)
        hidden = hidden.triu(slots.count - q + 1)
        total = scores.masked_fill_(hidden, -torch.inf).logsumexp(-1)
        if observed.sinks is not None:  # it takes its share of what the queries gave
            sink = per_group(observed.sinks, slots.keys.shape[1], queries)
            total = torch.logaddexp(total, sink[..., 0].to(total.dtype))
        if observed.live is not None:
            live = observed.live[:, -q:]
            # too few in one row are none in that row, whatever its neighbours have
            live = live & (live.sum(-1, keepdim=True) >= min(q, _LEAST_QUERIES))
            total = total.masked_fill(~live[:, None, None, :], torch.inf)
        scaled = queries.to(scores.dtype) * observed.scaling
        return _Seen(scaled.reshape(rows, -1, dim), total.reshape(rows, -1))

    def _corrected(self, kept: Slots, slots: Slots, seen: _Seen) -> Slots:
        """``kept`` with u and m fitted to the queries seen, head by head where it helps."""
        rows = seen.queries.shape[0]
        batch, heads = kept.keys.shape[:2]
        mine, target = (_contributions(s, seen) for s in (kept, slots))
        start = _sums(kept)
        wanted = target @ _sums(slots) - mine @ start
        # Columns by their mass, so that ridge means the same for a token and for a large group.
        size = kept.masses().reshape(rows, -1).to(mine.dtype)
        design = mine * size.unsqueeze(1)
        gram = (design @ design.mT).double()
        wanted = wanted.double()
        fit, check = slice(0, None, 2), slice(1, None, 2)
        half = self._solve(gram[:, fit, fit], wanted[:, fit])
        before = wanted[:, check].square().sum((1, 2))
        after = (wanted[:, check] - gram[:, check, fit] @ half).square().sum((1, 2))
        better = (after < before)[:, None, None]
        if not bool(better.any()):
            return kept
        weights = torch.where(better, self._solve(gram, wanted), 0.0).to(design.dtype)
        change = (design.mT @ weights) * size.unsqueeze(-1)
        new = start + change
        sound = new[..., -1] > _LEAST_MASS * start[..., -1]
        new = torch.where(sound.unsqueeze(-1), new, start)
        values = new[..., :-1].reshape(kept.values.shape).to(kept.values.dtype)
        mass = new[..., -1].reshape(batch, heads, -1).to(kept.masses().dtype)
        return replace(kept, values=values, mass=mass)

    def _solve(self, gram: Tensor, wanted: Tensor) -> Tensor:
        """Ridge least squares in its dual form, since queries are fewer than slots: weights of the
        queries, whose sum of rows of the design is the solution; 0 where there is none."""
        ridge = self.ridge * gram.diagonal(dim1=1, dim2=2).mean(-1) + 1e-30
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * identity)
        solved = torch.cholesky_solve(wanted, factor)
        usable = (info == 0)[:, None, None] & torch.isfinite(solved).all(dim=1, keepdim=True)
        return torch.where(usable, solved, 0.0)


def _decoded_attention(
    slots: Slots, observed: Observed, window: int
) -> tuple[Tensor, Tensor | float]:
    """``recent_attention``, in a third of the operations for a few decoded queries without padding,
    soft-capping or ALiBi: decoding pays for this every few tokens."""
    batch, heads, q, dim = observed.queries.shape
    plain = observed.plain and observed.live is None
    if not plain or q >= window or batch * heads * q * slots.count > _FEW_SCORES:
        return recent_attention(slots, observed, window)
    check_queries(observed.queries, slots, None)
    kv_heads, n = slots.keys.shape[1:3]
    dtype = compute_dtype(observed.queries.dtype)
    packed = (observed.queries.to(dtype) * observed.scaling).reshape(batch, kv_heads, -1, dim)
    scores = packed @ slots.keys.to(dtype).mT
    if slots.mass is not None:
        scores += slots.mass.to(dtype).log().unsqueeze(2)
    later = torch.ones(q, q, dtype=torch.bool, device=scores.device).triu(1)
    scores.view(batch, kv_heads, -1, q, n)[..., n - q :].masked_fill_(later, -torch.inf)
    if observed.sinks is None:
        attention = scores.softmax(-1)
    else:
        sink = per_group(observed.sinks, kv_heads, observed.queries)[..., 0]
        sink = sink.expand(batch, -1, -1, q).reshape(batch, kv_heads, -1, 1).to(dtype)
        attention = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    if slots.mass is not None:
        attention.nan_to_num_(0.0)  # a query whose every slot is dead
    keep, shared = 1 - 1 / window, heads // kv_heads
    newer = torch.arange(q - 1, -1, -1, device=scores.device, dtype=dtype)
    weights = (keep**newer / (window * shared)).repeat(shared)
    return (weights @ attention).float(), keep**q


def gaussian_factor(
    groups: Groups, keys: Tensor, mass: Tensor, weight: Tensor, queries: Tensor
) -> Tensor:
    """What the spread of a group adds to its share of attention.

    If a group's keys are Gaussian with mean k and diagonal covariance var, the mean of
    exp(<q, key>) is exp(<q, k> + sum_c var_c q_c^2 / 2). The slot says exp(<q, slot's key>), whose
    key is weighted by attention and thus off the mean already, so the factor is exp(<q, k - slot's
    key> + sum_c var_c q_c^2 / 2), with q and q^2 averaged over the queries.

    Args:
        groups: of the keys.
        keys: ``[R, n, head_dim]``.
        mass: ``[R, n]``, by which mean and variance are taken.
        weight: ``[R, n]``, by which the slot's key is.
        queries: ``[R, q, head_dim]``, scaling folded in.

    Returns:
        ``[R, count]``, between 1/e and e; 1 for a group of one.
    """

    def mean(x: Tensor, by: Tensor) -> Tensor:
        total = groups.sum(by.unsqueeze(-1))
        return groups.sum(x * by.unsqueeze(-1)) / torch.where(total > 0, total, 1.0)

    mass = mass.to(keys.dtype)
    center = mean(keys, mass)
    apart = keys - center.gather(1, groups.index.unsqueeze(-1).expand_as(keys))
    spread = mean(apart.square(), mass)
    shift = center - mean(keys, weight)
    queries = queries.to(keys.dtype)
    first = shift @ queries.mean(1).unsqueeze(-1)
    second = spread @ queries.square().mean(1).unsqueeze(-1) / 2
    return (first + second).squeeze(-1).clamp(-1.0, 1.0).exp()


def _contributions(slots: Slots, seen: _Seen) -> Tensor:
    """exp(score) / total of every slot for every query seen, ``[R, q, slots]``."""
    keys = slots.keys.reshape(seen.queries.shape[0], slots.count, -1).to(seen.queries.dtype)
    exponent = torch.baddbmm(-seen.log_total.unsqueeze(-1), seen.queries, keys.mT)
    return exponent.clamp_(max=30.0).exp_()


def _sums(slots: Slots) -> Tensor:
    """u and m side by side, ``[R, slots, value_dim + 1]``."""
    both = torch.cat([slots.values.to(slots.masses().dtype), slots.masses().unsqueeze(-1)], dim=-1)
    return both.flatten(0, 1)
