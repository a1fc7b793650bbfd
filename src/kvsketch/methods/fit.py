"""Sums of values and masses, fitted to queries by least squares."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.estimator import attention_scores
from kvsketch.methods.seen import Seen
from kvsketch.partial import NOTHING, log_mass, partial
from kvsketch.slots import Slots, compute_dtype

#: The smallest number of queries for a fit.
LEAST_QUERIES = 16
# The largest logarithm of a share of a query's attention, which is 0 or less but for rounding.
_MOST = 30.0
# A relative error below this is taken for rounding, which no fit can lower.
_ROUNDING = 1e-5
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
        than ``LEAST_QUERIES``, if nothing may be fitted to them, or if scores are not only products
        (soft-capping, ALiBi)."""
        if not seen.fit or not seen.plain or seen.queries.shape[2] < LEAST_QUERIES:
            return None
        window = seen.queries.shape[2] if seen.after else window
        queries, slots = seen.queries[:, :, -window:], seen.slots
        rows, group, q, dim = queries.shape
        dtype = compute_dtype(queries.dtype)
        scaled = queries.to(dtype) * seen.scaling
        packed = scaled.reshape(rows, group * q, dim)
        own = 0 if seen.after else q  # of the queries, of which none sees later ones
        total = _attended(packed, slots.narrow(0, slots.count - own), False)[1]
        total = total.view(rows, group, q)
        if own:
            new = slots.narrow(slots.count - q, q)
            scores = attention_scores(queries, new, seen.scaling, None, None, None).squeeze(1)
            if new.mass is not None:
                scores += log_mass(new.mass.to(dtype)).unsqueeze(2)
            later = torch.ones(q, q, dtype=torch.bool, device=scores.device).triu_(1)
            total = torch.logaddexp(total, scores.masked_fill_(later, NOTHING).logsumexp(-1))
        if seen.sinks is not None:  # a sink in the softmax takes its share of the total
            total = torch.logaddexp(total, seen.sinks.to(total.dtype).unsqueeze(-1))
        if seen.live is not None:
            live = seen.live[:, -q:]
            # A row with too few queries gets no fit, whatever the other rows have.
            live = live & (live.sum(-1, keepdim=True) >= min(q, LEAST_QUERIES))
            total = total.masked_fill(~live.unsqueeze(1), torch.inf)
        number = torch.arange(q, device=packed.device).repeat(group)
        left_out = number % 2 == 1 if seen.after else number >= q // 2
        return Asked(packed, total.reshape(rows, -1), left_out)


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
    mine = _contributions(kept, asked)
    start = _sums(kept, mine.dtype)
    given, log_total = _attended(asked.queries, slots.map(lambda t: t.flatten(0, 1)[:, None]))
    share = (log_total - asked.log_total).clamp_(max=_MOST).exp_().unsqueeze(-1)
    target = torch.cat([given * share, share], dim=-1)
    wanted = target - mine @ start
    # Columns are scaled by mass, so that ridge means the same for a token and for a large group.
    mass = kept.masses().reshape(rows, -1).to(mine.dtype)
    design = mine * mass.unsqueeze(1)
    gram = (design @ design.mT).double()
    wanted = wanted.double()
    used, check = ~asked.left_out, asked.left_out
    half = _solve(gram[:, used][:, :, used], wanted[:, used], ridge)
    before = wanted[:, check].square().sum((1, 2))
    after = (wanted[:, check] - gram[:, check][:, :, used] @ half).square().sum((1, 2))
    size = target[:, check].double().square().sum((1, 2))
    better = ((after < before) & (before > _ROUNDING**2 * size))[:, None, None]
    if not bool(better.any()):
        return kept
    weights = torch.where(better, _solve(gram, wanted, ridge), 0.0).to(design.dtype)
    change = (design.mT @ weights) * mass.unsqueeze(-1)
    new = start + change
    sound = new[..., -1] > _LEAST_MASS * start[..., -1]
    new = torch.where(sound.unsqueeze(-1), new, start)
    values = new[..., :-1].reshape(kept.values.shape).to(kept.values.dtype)
    fitted_mass = new[..., -1].reshape(batch, heads, -1).to(kept.masses().dtype)
    return replace(kept, values=values, mass=fitted_mass)


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
    return exponent.clamp_(max=_MOST).exp_()


def _attended(queries: Tensor, slots: Slots, values: bool = True) -> tuple[Tensor, Tensor]:
    """The attention of ``[R, q, head_dim]`` queries over ``[R, 1, n, ...]`` slots, and the log of
    its total, ``[R, q]``; without ``values``, the former has no meaning."""
    keys = slots.keys.to(queries.dtype)
    bias = None if slots.mass is None else log_mass(slots.mass.to(queries.dtype)).unsqueeze(2)
    mean = slots.mean_values().to(queries.dtype) if values else keys
    if not slots.count:
        return queries.new_zeros(*queries.shape[:2], mean.shape[3]), queries.new_full(
            queries.shape[:2], NOTHING
        )
    out, total = partial(queries.unsqueeze(1), keys, mean, bias, 1.0)
    return out.squeeze(1), total.squeeze(1)


def _sums(slots: Slots, dtype: torch.dtype) -> Tensor:
    """u and m, concatenated, ``[R, slots, value_dim + 1]``."""
    both = torch.cat([slots.values.to(dtype), slots.masses().unsqueeze(-1).to(dtype)], dim=-1)
    return both.flatten(0, 1)
