"""LagKV: the tokens that differ most from the tokens after them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import at_least
from kvsketch.methods.base import Compressor, keep_top
from kvsketch.methods.beside import column_of, with_columns, without_columns
from kvsketch.methods.scoring import score_of
from kvsketch.slots import Slots, compute_dtype


class LagKV(Compressor):
    """Of every ``lag`` successive tokens, keep those that differ most from the next ``lag``.

    The paper's section 3 (and kvpress's LagKVPress, ``cross_scoring=False``): tokens behind the
    sinks are cut into parts of ``lag``. Keys, and values likewise, are scaled channel by channel to
    the range that the next part has; a token's score is the standard deviation of its channels,
    softmax over its part; that of keys and values is averaged, and tokens are ranked within their
    part. What has no part behind it, the last whole part and the rest, is kept, and where there
    are fewer than two parts the newest tokens are.

    Kept tokens are kvpress's (its ``n_sink`` is our ``sink``) where the budget gives every part as
    many tokens. Else some parts get one more: the newest ones here; which ones in kvpress is left
    to the order in which torch finds equal ranks. A channel in which the next part does not vary is
    ignored (kvpress divides by 0). No queries are needed and no state is kept: the remaining tokens
    of a part are treated like any others in the next compression.

    Args:
        lag: tokens in a part, >= 1; kvpress's ``lag_size``.

    Raises:
        InputError: ``lag`` out of range.
    """

    name = "lagkv"
    paper = "Liang et al., LagKV: Lag-Relative Information of the KV Cache (2504.04704)"
    ragged = True
    keeps_tokens = True

    def __init__(self, lag: int = 128, seed: int = 0) -> None:
        super().__init__(seed)
        self.lag = at_least("lag", lag, 1)

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        # The recent window is what the tokens before it are compared with: ranked all together.
        ranked = replace(slots, score=lag_order(slots, sink, self.lag))
        # Another method's scores stay.
        return ranked if slots.score is None else with_columns(ranked, slots.score)

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, fit: bool) -> Slots:
        if slots.score is None:
            return replace(kept, score=None)
        scored_before = replace(kept, score=column_of(kept, -1))
        return without_columns(scored_before, 1, slots.keys.dtype)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        return keep_top(slots, score_of(slots, self.name), budget)


def lag_order(slots: Slots, sink: int, lag: int) -> Tensor:
    """Numbers that rank slots, float32 ``[batch, heads, n]``, the highest for the best: the rank
    within a part of ``lag``, of equal ranks the newest first, and above these what has no whole
    part behind it, the newest first. Parts are of live slots, behind the first ``sink``."""
    n, live = slots.count, slots.live()
    count = torch.full(slots.keys.shape[:2], n, device=slots.keys.device)
    order = None
    if live is not None:
        count = live.sum(-1)
        order = live.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        slots = slots.take(order)
    parts = -(-max(0, n - sink) // lag)
    place = torch.arange(n, device=count.device) - sink
    newest = (lag * parts + place).float().expand(*count.shape, n)
    if parts < 2:
        return newest if order is None else torch.zeros_like(newest).scatter(-1, order, newest)
    apart = (_apart(x[:, :, sink:], lag) for x in (slots.keys, slots.mean_values()))
    both = sum(apart, slots.keys.new_zeros(()))  # [batch, heads, parts - 1, lag]
    rank = both.argsort(-1).argsort(-1)
    number = torch.arange(parts - 1, device=count.device)
    ranked = (rank * parts + number.unsqueeze(-1)).flatten(2).float()
    compared = (place // lag + 2) * lag <= (count - sink).unsqueeze(-1)
    at = place.clamp(0, ranked.shape[-1] - 1).expand_as(newest)
    score = torch.where(compared, ranked.gather(-1, at), newest)
    return score if order is None else torch.zeros_like(score).scatter(-1, order, score)


def _apart(x: Tensor, lag: int) -> Tensor:
    """How much the tokens of every part but the last stand out against the next part, softmax over
    the part: ``[batch, heads, parts - 1, lag]`` of ``[batch, heads, tokens, dim]``."""
    x = x.to(compute_dtype(x.dtype))
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % lag))
    x = x.view(*x.shape[:2], -1, lag, x.shape[3])
    low, high = x[:, :, 1:].aminmax(dim=3, keepdim=True)
    spread = high - low
    scaled = torch.where(spread > 0, (x[:, :, :-1] - low) / spread, 0.0)
    return scaled.std(-1, correction=min(1, x.shape[-1] - 1)).softmax(-1)
