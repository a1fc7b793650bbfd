"""Keep the heavy tokens, merge the rest. Ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError, at_least
from ..slots import Observed, Slots, attention_scores, compute_dtype
from .base import Compressor
from .clustering import group_keys, merge
from .snapkv import recent_attention, scored_before

# Weight of an unattended token beside one of average attention: it should pull a little.
_FLOOR = 1e-3
# Fewer queries are decoded ones, and too few to fit anything to.
_LEAST_QUERIES = 16
# A corrected mass may not fall below this share of what it was.
_LEAST_MASS = 0.1


@dataclass(frozen=True)
class _Seen:
    """The last prompt queries, to correct the slots by.

    Attributes:
        queries: ``[R, q, head_dim]``, scaling folded in.
        log_total: ``[R, q]``, log of the sum of exp(score) m over all slots.
    """

    queries: Tensor
    log_total: Tensor


class HeavyMerge(Compressor):
    """A share of the budget keeps the most attended tokens as they are; the rest is grouped by
    k-means on keys, weighted by attention, and each group becomes one slot.

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
        steps: Lloyd iterations, >= 1.
        correct: fit u and m where queries are known.
        ridge: of the fit, relative to the mean diagonal, > 0.
        seed: unused; there is no randomness.

    Raises:
        InputError: an argument out of range.
    """

    name = "heavy_merge"
    paper = "ours"
    needs_queries = True
    window: int

    def __init__(
        self,
        share: float = 0.25,
        window: int = 64,
        steps: int = 5,
        correct: bool = True,
        ridge: float = 0.1,
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
        self._seen: _Seen | None = None

    def reset(self) -> None:
        self._seen = None

    def tensors(self) -> list[Tensor]:
        return [] if self._seen is None else [self._seen.queries, self._seen.log_total]

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            return scored_before(slots, self.name)
        received, fade = recent_attention(slots, observed, self.window)
        if slots.score is not None:
            received = received + slots.score * fade
        self._seen = self._remember(slots, observed) if self.correct else None
        return replace(slots, score=received)

    def compress(self, slots: Slots, budget: int) -> Slots:
        seen, self._seen = self._seen, None
        if budget == 0:
            return slots.narrow(0, 0)
        batch, heads, n = slots.keys.shape[:3]
        score = scored_before(slots, self.name).score
        assert score is not None
        mass, live = slots.masses(), slots.live()
        norm = slots.values.to(score.dtype).norm(dim=-1) / torch.where(mass > 0, mass, 1.0)
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
        groups = group_keys(keys, flat, budget - heavy, self.steps)
        kept = Slots.cat([slots.take(first), merge(rest, groups, flat, attended=True)])
        return kept if seen is None else self._corrected(kept, slots, seen)

    def _remember(self, slots: Slots, observed: Observed) -> _Seen | None:
        """The last ``window`` queries, if they are a prompt's and scores are plain products."""
        plain = observed.softcap is None and observed.slopes is None and observed.live is None
        few = observed.queries.shape[2] < _LEAST_QUERIES
        if not plain or few or slots.live() is not None:
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
        design = (mine * size.unsqueeze(1)).double()
        fit, check = slice(0, None, 2), slice(1, None, 2)
        change = self._solve(design[:, fit], wanted[:, fit].double())
        before = wanted[:, check].square().sum((1, 2))
        after = (wanted[:, check] - design[:, check] @ change).square().sum((1, 2))
        better = after < before
        if not bool(better.any()):
            return kept
        change = self._solve(design, wanted.double()) * size.unsqueeze(-1)
        change = torch.where(better[:, None, None], change, 0.0)
        new = start + change.to(start.dtype)
        sound = new[..., -1] > _LEAST_MASS * start[..., -1]
        new = torch.where(sound.unsqueeze(-1), new, start)
        values = new[..., :-1].reshape(kept.values.shape).to(kept.values.dtype)
        mass = new[..., -1].reshape(batch, heads, -1).to(kept.masses().dtype)
        return replace(kept, values=values, mass=mass)

    def _solve(self, design: Tensor, wanted: Tensor) -> Tensor:
        """Ridge least squares in its dual form: queries are fewer than slots."""
        gram = design @ design.mT
        ridge = self.ridge * gram.diagonal(dim1=1, dim2=2).mean(-1) + 1e-30
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * identity)
        solved = design.mT @ torch.cholesky_solve(wanted, factor)
        usable = (info == 0)[:, None, None] & torch.isfinite(solved)
        return torch.where(usable, solved, 0.0)


def _contributions(slots: Slots, seen: _Seen) -> Tensor:
    """exp(score) / total of every slot for every query seen, ``[R, q, slots]``."""
    keys = slots.keys.reshape(seen.queries.shape[0], slots.count, -1).to(seen.queries.dtype)
    exponent = torch.baddbmm(-seen.log_total.unsqueeze(-1), seen.queries, keys.mT)
    return exponent.clamp_(max=30.0).exp_()


def _sums(slots: Slots) -> Tensor:
    """u and m side by side, ``[R, slots, value_dim + 1]``."""
    both = torch.cat([slots.values.to(slots.masses().dtype), slots.masses().unsqueeze(-1)], dim=-1)
    return both.flatten(0, 1)
