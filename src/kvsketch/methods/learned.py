"""The largest attention that queries after a context give its tokens, and its prediction for tokens
outside a sample of the context."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsketch.estimator import attention_received
from kvsketch.kernels import triton_support
from kvsketch.kernels.shares import largest_shares
from kvsketch.observed import Observed
from kvsketch.reread import plain
from kvsketch.slots import Slots, compute_dtype

# Of the regression, relative to the variance of a feature.
_RIDGE = 1e-2
# What a score is at least: the log of a smaller one would say nothing but count.
_LEAST = 1e-6
# Rows of a regression that are summed together on a GPU.
_PART = 256


def largest_attention(slots: Slots, asked: Observed, sample: Tensor | None) -> Tensor:
    """The largest share of attention that any of the queries, and any query head of its group,
    gives each token, float32 ``[batch, num_key_value_heads, n]``.

    Args:
        slots: tokens, or what they were compressed to.
        asked: queries ``after`` all of them.
        sample: the tokens whose queries they are, int64, in order, if not of all:
            ``learned_scores`` then predicts how much the others would get.
    """
    exact = replace(slots, mass=None)
    massive = slots.mass is not None and triton_support.chosen(slots.keys)
    if plain(asked, exact) and not massive:
        found = largest_shares(asked, slots.keys, slots.mass).float()
    else:
        found = attention_received(slots, asked, None, True).float()
    if sample is None:
        return found
    learned = learned_scores(replace(slots, score=found), sample).score
    assert learned is not None
    return learned


def learned_scores(slots: Slots, sample: Tensor) -> Slots:
    """Adds predicted scores for the tokens outside a scored sample. Ours.

    In every head a ridge regression on the sample predicts the log of a score from the token's
    value, which does not depend on the position. A token's score is at least the mean that follows
    if the residual is normal: exp(log + variance / 2), at most 1. A head whose scores cannot be
    predicted thus gives all tokens the same score and does not keep some of them by chance.

    Args:
        slots: ``[batch, num_key_value_heads, n, ...]``, all of them with a score; only the scores
            in the sample are used.
        sample: int64, the tokens in the sample, in order.
    """
    assert slots.score is not None
    wide = compute_dtype(slots.values.dtype)
    x = slots.values.to(wide)
    known = slots.score[:, :, sample].to(wide).clamp(min=_LEAST).log().unsqueeze(-1)
    live = slots.live()
    real = torch.ones_like(known) if live is None else live[:, :, sample].unsqueeze(-1).to(wide)
    guess = _expected(x, x[:, :, sample], known, real).squeeze(-1).clamp(max=1.0)
    if live is not None:
        guess = guess.masked_fill(~live, 0.0)
    # At a seam of the sample nothing leads to a token, which has too low a score then; and what is
    # not in the sample has none.
    return replace(slots, score=torch.maximum(slots.score, guess.to(slots.score.dtype)))


def corrected(slots: Slots, sample: Tensor, echo: Tensor) -> Slots:
    """An echo's scores, multiplied in every head by the root of the ratio of the sample's mean
    score by a second reading to that by the echo; in the sample, the larger one of both. Ours.

    An echo orders the tokens of a head better than a prediction from their values, and some heads
    it overrates: the sample says which. The ratio itself would follow a sample too far, whose
    queries attend to less than those of the whole context, and whose first tokens nothing leads to.

    Args:
        slots: ``[batch, num_key_value_heads, n, ...]``, all of them with a score; only the scores
            in the sample are used.
        sample: int64, the tokens in the sample, in order.
        echo: scores of all tokens, ``[batch, num_key_value_heads, n]``.
    """
    assert slots.score is not None
    live, real = slots.live(), slots.score[:, :, sample]
    own = echo[:, :, sample]
    if live is not None:  # padding has no score by either
        real, own = (torch.where(live[:, :, sample], t, 0.0) for t in (real, own))
    ratio = real.mean(-1, keepdim=True) / own.mean(-1, keepdim=True).clamp(min=_LEAST)
    score = echo * ratio.sqrt().to(echo.dtype)
    larger = torch.maximum(score[:, :, sample], real.to(echo.dtype))
    score = score.index_copy(2, sample, larger)
    return replace(slots, score=score if live is None else score.masked_fill(~live, 0.0))


def _expected(every: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """The mean of exp(y) at ``every`` point, by a ridge regression of y on x in every head.

    Args:
        every: ``[batch, heads, n, features]``.
        x: ``[batch, heads, m, features]``.
        y: ``[batch, heads, m, 1]``.
        real: same shape, 0 for rows that do not count, else 1.

    Returns:
        ``[batch, heads, n, 1]``.
    """
    count = real.sum(2, keepdim=True).clamp(min=1)
    middle, level = ((t * real).sum(2, keepdim=True) / count for t in (x, y))
    x, y = (x - middle) * real, (y - level) * real
    scale = (x.square().sum(2, keepdim=True) / count).sqrt().clamp(min=1e-12)
    x = x / scale
    # Few of a GPU's processors would work on so small a result.
    part = x.shape[2] if x.device.type == "cpu" else _PART
    square = _sums_of_products(x, x, part) / count
    square.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    weights: Tensor = torch.linalg.solve(square, _sums_of_products(x, y, part) / count)
    variance = (y - x @ weights).square().sum(2, keepdim=True) / count
    return (((every - middle) / scale) @ weights + level + variance / 2).exp()


def _sums_of_products(x: Tensor, y: Tensor, part: int) -> Tensor:
    """``x.mT @ y``, so many rows at a time."""
    parts = -(-x.shape[2] // part)
    if parts < 2:
        return x.mT @ y
    x, y = (pad(t, (0, 0, 0, parts * part - t.shape[2])) for t in (x, y))
    x, y = (t.view(*t.shape[:2], parts, part, t.shape[3]) for t in (x, y))
    return (x.mT @ y).sum(2)
