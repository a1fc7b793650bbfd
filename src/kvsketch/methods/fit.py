"""Sums of values and masses, fitted to queries by least squares."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.estimator import attention_scores
from kvsketch.methods.seen import Seen
from kvsketch.slots import Slots

#: The smallest number of queries for a fit.
LEAST_QUERIES = 16
# A fitted mass is at least this share of the mass before the fit.
_LEAST_MASS = 0.1


@dataclass(frozen=True)
class Asked:
    """Queries for a fit, with the totals of their attention.

    Attributes:
        queries: ``[R, q, head_dim]``, multiplied by the scaling.
        log_total: ``[R, q]``, the log of the sum of exp(score) m over all slots, and of exp(sink)
            if the softmax has a sink. Infinity for a query that does not count (padding).
        left_out: bool ``[q]``, those on which a fit to the others is checked: the later half. They
            stand for the queries to come, which are less like the fitted ones than their neighbours
            are. In a second reading, whose queries come from the whole context, every second one.
    """

    queries: Tensor
    log_total: Tensor
    left_out: Tensor

    @staticmethod
    def of(seen: Seen, window: int) -> Asked | None:
        """The last ``window`` queries, or all queries of a second reading. None if there are fewer
        than ``LEAST_QUERIES``, or if scores are not only products (soft-capping, ALiBi)."""
        if not seen.plain or seen.queries.shape[2] < LEAST_QUERIES:
            return None
        window = seen.queries.shape[2] if seen.after else window
        queries, slots = seen.queries[:, :, -window:], seen.slots
        rows, _, q, dim = queries.shape
        scores = attention_scores(queries, slots, seen.scaling, None, None, None)
        if slots.mass is not None:
            scores += slots.mass.to(scores.dtype).log()[:, :, None, None]
        if not seen.after:
            hidden = torch.ones(q, slots.count, dtype=torch.bool, device=scores.device)
            scores.masked_fill_(hidden.triu(slots.count - q + 1), -torch.inf)
        total = scores.logsumexp(-1).squeeze(1)
        if seen.sinks is not None:  # a sink in the softmax takes its share of the total
            total = torch.logaddexp(total, seen.sinks.to(total.dtype).unsqueeze(-1))
        if seen.live is not None:
            live = seen.live[:, -q:]
            # A row with too few queries gets no fit, whatever the other rows have.
            live = live & (live.sum(-1, keepdim=True) >= min(q, LEAST_QUERIES))
            total = total.masked_fill(~live.unsqueeze(1), torch.inf)
        scaled = queries.to(scores.dtype) * seen.scaling
        number = torch.arange(q, device=scores.device).repeat(scaled.shape[1])
        left_out = number % 2 == 1 if seen.after else number >= q // 2
        return Asked(scaled.reshape(rows, -1, dim), total.reshape(rows, -1), left_out)


def fitted(kept: Slots, slots: Slots, asked: Asked, ridge: float) -> Slots:
    """``kept``, the result of compressing ``slots``, with u and m fitted to the numerators and
    denominators of ``slots``. A head is fitted only if this lowers the error on queries that were
    left out of the fit.

    The fit is ridge least squares by Cholesky in the space of queries, which are fewer than slots.
    The penalty is on the change of u and m and not on their size.

    Args:
        kept: ``[batch, heads, count, ...]``.
        slots: ``[batch, heads, n, ...]``.
        asked: the queries of R = batch x heads rows.
        ridge: relative to the mean diagonal of the Gram matrix, > 0.
    """
    rows = asked.queries.shape[0]
    batch, heads = kept.keys.shape[:2]
    mine, target = (_contributions(s, asked) for s in (kept, slots))
    start = _sums(kept, mine.dtype)
    # _sums is not used here because it would copy all values of a prompt.
    given = target @ slots.values.flatten(0, 1).to(mine.dtype)
    total = target if slots.mass is None else target * slots.mass.view(rows, 1, -1).to(mine.dtype)
    wanted = torch.cat([given, total.sum(-1, keepdim=True)], dim=-1) - mine @ start
    # Columns are scaled by mass, so that ridge means the same for a token and for a large group.
    size = kept.masses().reshape(rows, -1).to(mine.dtype)
    design = mine * size.unsqueeze(1)
    gram = (design @ design.mT).double()
    wanted = wanted.double()
    used, check = ~asked.left_out, asked.left_out
    half = _solve(gram[:, used][:, :, used], wanted[:, used], ridge)
    before = wanted[:, check].square().sum((1, 2))
    after = (wanted[:, check] - gram[:, check][:, :, used] @ half).square().sum((1, 2))
    better = (after < before)[:, None, None]
    if not bool(better.any()):
        return kept
    weights = torch.where(better, _solve(gram, wanted, ridge), 0.0).to(design.dtype)
    change = (design.mT @ weights) * size.unsqueeze(-1)
    new = start + change
    sound = new[..., -1] > _LEAST_MASS * start[..., -1]
    new = torch.where(sound.unsqueeze(-1), new, start)
    values = new[..., :-1].reshape(kept.values.shape).to(kept.values.dtype)
    mass = new[..., -1].reshape(batch, heads, -1).to(kept.masses().dtype)
    return replace(kept, values=values, mass=mass)


def _solve(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Ridge least squares in its dual form: the weights of the queries with which the weighted sum
    of the rows of the design is the solution. They are 0 where there is no solution."""
    added = ridge * gram.diagonal(dim1=1, dim2=2).mean(-1) + 1e-30
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + added[:, None, None] * identity)
    solved = torch.cholesky_solve(wanted, factor)
    usable = (info == 0)[:, None, None] & torch.isfinite(solved).all(dim=1, keepdim=True)
    return torch.where(usable, solved, 0.0)


def _contributions(slots: Slots, asked: Asked) -> Tensor:
    """exp(score) / total of every slot for every query of ``asked``, ``[R, q, slots]``."""
    keys = slots.keys.reshape(asked.queries.shape[0], slots.count, -1).to(asked.queries.dtype)
    exponent = torch.baddbmm(-asked.log_total.unsqueeze(-1), asked.queries, keys.mT)
    return exponent.clamp_(max=30.0).exp_()


def _sums(slots: Slots, dtype: torch.dtype) -> Tensor:
    """u and m, concatenated, ``[R, slots, value_dim + 1]``."""
    both = torch.cat([slots.values.to(dtype), slots.masses().unsqueeze(-1).to(dtype)], dim=-1)
    return both.flatten(0, 1)
