"""Keep the heavy tokens, merge the rest. Ours."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError, at_least
from kvsketch.estimator import check_queries
from kvsketch.kernels import cpu
from kvsketch.methods.base import Compressor
from kvsketch.methods.clustering import check_pairs, group
from kvsketch.methods.groups import merge, packed
from kvsketch.methods.keydiff import similarity
from kvsketch.methods.learned import corrected, largest_attention, learned_scores
from kvsketch.methods.order import order
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.rereading import reread_attention
from kvsketch.methods.scoring import recent_attention, score_of
from kvsketch.observed import Observed
from kvsketch.pieces import at_once
from kvsketch.slots import Slots, compute_dtype

# The weight of a token without attention, relative to one of average attention: it counts a little.
_FLOOR = 1e-3
# The share of the budget that keeps tokens unchanged: where the last queries alone have scored the
# tokens, later ones may ask for any other; where the whole context has been asked for, few will.
# A few groups for any budget, or none, would answer more of LongEval, and less of RULER, whose text
# repeats; with none, a model loses the answer whose one retrieving head needs most of the budget.
_SHARE, _SHARE_ASKED = 0.25, 0.9
# How much the mean attention of the last queries counts beside the largest share of attention that
# any query of an echo gives a token. Larger: fewer later questions are answered; smaller: worse
# predictions of what follows the prompt at once (KL of stories260K, docs/errors.md).
_RECENT = 4.0
# Heads are compared by what stands out: tokens that a head attends to like most others can share
# slots. A token stands out whose weight is so many times that of the head's median token, or whose
# score exceeds the second number, as do all of a head whose median score exceeds it, since a head
# may need most of its tokens. The weights of all others are multiplied by the last number.
_TYPICAL, _DECISIVE, _LESS = 3.0, 0.3, 1e-3
# Scores of decoded queries that are computed at a time: 2 MB in float32.
_FEW_SCORES = 1 << 19


class HeavyMerge(Compressor):
    """A fraction of the budget keeps the most attended tokens and those with the most distinct keys
    unchanged; the others are grouped by rounds of merging the closest (weighted by the root of
    attention), and each group becomes one slot.

    Attention is that of the last ``window`` queries (``SnapKV``'s, without pooling), or the largest
    of a second reading. Where the model's positions allow it, all queries of a prompt are asked
    again after it (``cache.echo``), and the largest share of attention that one of them gives a
    token is added to four times the former. Queries that come later raise the attention of a token
    and never lower it: what was important may be asked for at any later time. The weight of a
    token is its attention times the norm of its value. Heads are compared by the tokens of more
    than three times the weight of their median token, and those with a share above 0.3; a head
    whose median token has such a share needs all of them (``importance``). A group's slot is (mean
    key, mass times mean value, mass), the means weighted by attention.

    There is no factor for what a group's spread adds to exp(score), from the mean of exp under a
    Gaussian, and u and m are not fitted to queries: neither helps (docs/errors.md).

    Args:
        share: fraction of the budget that keeps tokens unchanged, in [0, 1). None: 0.9 if the
            queries have asked for the whole context (an echo, a second reading), else 0.25.
        distinct: choose these in turn by attention and by the keys' distance from their mean
            direction. False, and where queries have asked for the whole context: by attention
            alone.
        window: number of last queries whose attention counts, >= 1.
        steps: Lloyd iterations, >= 1, if k-means groups the keys instead: with ``pairs`` 0, or if
            too many costs are equal.
        pairs: the fraction of the slots that is merged in a round, in (0, 1/2]; 0: k-means.
        seed: unused; there is no randomness.

    Raises:
        InputError: an argument out of range.
    """

    name = "heavy_merge"
    paper = "ours"
    ragged = True
    local = True
    requires = Requirements(queries=True, values=False, second_reading="allowed", echo=True)
    allocation = "measured"
    allocation_reread = "global"
    bits = "measured"
    window: int

    def __init__(
        self,
        share: float | None = None,
        window: int = 64,
        steps: int = 5,
        pairs: float = 0.25,
        distinct: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if share is not None and not 0 <= share < 1:
            raise InputError(f"share={share!r} must lie in [0, 1), or be None")
        self.share = share
        self.window = at_least("window", window, 1)
        self.steps = at_least("steps", steps, 1)
        self.pairs = check_pairs(pairs)
        self.distinct = distinct

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        if observed is None:
            score_of(slots, self.name)  # raises
            return slots
        received = _decoded_attention(slots, observed, self.window) * _RECENT
        if slots.score is not None:
            received = torch.maximum(received, slots.score)
        return replace(slots, score=received)

    def weights_of(self, observed: Observed) -> Tensor | None:
        if not _decoded(observed, self.window):
            return None
        newer = torch.arange(observed.queries.shape[2] - 1, -1, -1, device="cpu")
        weights: Tensor = _RECENT / self.window * (1 - 1 / self.window) ** newer.float()
        return weights

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        return reread_attention(slots, observed, about)

    def complete(self, slots: Slots, sample: Tensor, echo: Tensor | None) -> Slots:
        return learned_scores(slots, sample) if echo is None else corrected(slots, sample, echo)

    def echo(self, slots: Slots, asked: Observed, sample: Tensor | None, alone: bool) -> Slots:
        found = largest_attention(slots, asked, sample)
        if not alone:
            found = score_of(slots, self.name) + found
        return replace(slots, score=found)

    def importance(self, slots: Slots) -> Tensor:
        worth, score, live = self._worth(slots), score_of(slots, self.name), slots.live()
        out = (worth > _TYPICAL * _median(worth, live)) | (score > _DECISIVE)
        out |= _median(score, live) > _DECISIVE
        return torch.where(out, worth, _LESS * worth)

    def _worth(self, slots: Slots) -> Tensor:
        """The weight of each token: its attention times the norm of its value."""
        norm = torch.linalg.vector_norm(
            slots.values, dim=-1, dtype=compute_dtype(slots.values.dtype)
        )
        mass = slots.masses()
        found: Tensor = score_of(slots, self.name) * norm / torch.where(mass > 0, mass, 1.0)
        return found

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        batch, heads, n = slots.keys.shape[:3]
        weight = score_of(slots, self.name).flatten(0, 1)
        live, device = slots.live(), weight.device
        mass = slots.masses().flatten(0, 1)
        if live is not None:
            live = live.flatten(0, 1)
            weight = weight.masked_fill(~live, -1.0)
        # For R = batch x heads rows: the numbers of slots before and after, and of unchanged ones.
        size = torch.full((batch * heads,), n, device=device)
        if isinstance(budget, Tensor) and live is not None:
            size = live.sum(1)
        wanted = torch.as_tensor(budget, device=device).expand(batch, heads).flatten()
        share = self.share
        if share is None:
            share = _SHARE_ASKED if asked_again else _SHARE
        heavy = torch.minimum(wanted - 1, (share * wanted.double()).round().long())
        column = torch.arange(n, device=device)
        attended = self._worth(slots).flatten(0, 1).masked_fill_(weight < 0, -1.0)
        places = order(attended, descending=True)
        if self.distinct and not asked_again:
            alike = similarity(slots).flatten(0, 1).masked_fill_(weight < 0, torch.inf)
            places = _in_turn(places, order(alike))
        first = torch.zeros_like(places, dtype=torch.bool)
        first.scatter_(1, places, column < heavy.unsqueeze(1))
        rest = size - heavy
        others, real = packed(~first & (column < size.unsqueeze(1)), int(rest.max()))
        pull = weight.gather(1, others).clamp_(min=0.0) * real
        mean = pull.sum(1, keepdim=True) / rest.unsqueeze(1)
        pull = (pull + _FLOOR * (mean + 1e-12) * mass.gather(1, others)) * real
        if live is not None:
            pull = pull * live.gather(1, others)
        pull = pull.to(compute_dtype(slots.keys.dtype))
        # Attention differs by orders of magnitude and only approximates that of later queries.
        price, count = pull.sqrt(), wanted - heavy
        groups = group(slots, pull, price, count, self.steps, self.pairs, others, rest)
        most = int(wanted.max())
        return merge(slots, groups, pull, True, others, ahead=first, width=most)


def _median(numbers: Tensor, live: Tensor | None) -> Tensor:
    """The median of the live ones of ``[batch, heads, n]``, ``[batch, heads, 1]``."""
    n = numbers.shape[-1]
    count = torch.full_like(numbers[..., 0], n) if live is None else live.sum(-1)
    real = numbers if live is None else numbers.masked_fill(~live, torch.inf)
    place = (count // 2).long().clamp(max=n - 1).unsqueeze(-1)
    return real.sort(-1).values.gather(-1, place)


def _in_turn(first: Tensor, second: Tensor) -> Tensor:
    """Two orders of the same numbers, ``[R, n]`` each, as one: each number at its better place, and
    before that of the second order where the places are equal."""
    column = torch.arange(first.shape[1], device=first.device).expand_as(first)
    place = torch.empty_like(first).scatter_(1, first, 2 * column)
    other = torch.empty_like(first).scatter_(1, second, 2 * column + 1)
    return order(torch.minimum(place, other))


def _decoded(observed: Observed, window: int) -> bool:
    """Whether these are a few queries of decoded tokens, without padding, soft-capping or ALiBi."""
    few = observed.queries.shape[2] < window
    return few and observed.plain and observed.live is None and not observed.after


def _decoded_attention(slots: Slots, observed: Observed, window: int) -> Tensor:
    """``recent_attention`` in fewer operations for decoded queries without padding, soft-capping or
    ALiBi, because decoding computes this every few tokens."""
    batch, heads, q, dim = observed.queries.shape
    if cpu.takes(observed.queries) or not _decoded(observed, window):
        return recent_attention(slots, observed, window)[0]
    check_queries(observed.queries, slots, None)
    kv_heads, n = slots.keys.shape[1:3]
    rows, shared = batch * kv_heads, heads // kv_heads
    dtype = compute_dtype(observed.queries.dtype)
    packed = (observed.queries.to(dtype) * observed.scaling).reshape(rows, -1, dim)
    keys = slots.keys.flatten(0, 1)
    log_mass = None if slots.mass is None else slots.mass.to(dtype).log().view(rows, 1, n)
    sink = None
    if observed.sinks is not None:
        sink = observed.sinks.to(dtype).view(1, kv_heads, shared, 1).expand(batch, -1, -1, q)
        sink = sink.reshape(rows, -1, 1)
    later = torch.ones(q, q, dtype=torch.bool, device=keys.device).triu(1)
    keep = 1 - 1 / window
    newer = torch.arange(q - 1, -1, -1, device=keys.device, dtype=dtype)
    weights = (keep**newer / (window * shared)).repeat(shared)
    received = torch.empty(rows, n, dtype=torch.float32, device=keys.device)
    step = max(1, at_once(keys, _FEW_SCORES) // (shared * q * n))
    for start in range(0, rows, step):  # rows whose scores stay in the processor's cache
        part = slice(start, start + step)
        scores = packed[part] @ keys[part].to(dtype).mT
        if log_mass is not None:
            scores += log_mass[part]
        scores.view(-1, shared, q, n)[..., n - q :].masked_fill_(later, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        if sink is not None:
            highest = torch.maximum(highest, sink[part])
        highest = highest.clamp_(min=torch.finfo(dtype).min)  # for queries whose slots are all dead
        share = scores.sub_(highest).exp_()
        total = share.sum(-1)
        if sink is not None:
            total += (sink[part] - highest).exp_().squeeze(-1)
        found = (weights / total.clamp_(min=1e-30)).unsqueeze(1) @ share
        received[part] = found.squeeze(1)
    return received.view(batch, kv_heads, n)
