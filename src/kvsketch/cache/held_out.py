"""Measures a layer's errors against kept slots, on queries that the method has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.curves import Curves, pooled
from kvsketch.cache.error import WindowError, asked_of, relative_error
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.slots import Slots

#: fractions of the tokens between sinks and recent window at which errors are measured
# Nothing between one half and all: if retrieval depends on every token, three quarters have a small
# error but lose the answer.
LEVELS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

#: (tokens, budget, queries) to slots
Compress = Callable[[Slots, int, Observed], Slots]
#: (tokens, queries) to scored slots
Observe = Callable[[Slots, Observed], Slots]
#: (slots, room) to the page on which they are stored, with room for as many more
Store = Callable[[Slots, int], Page]


def as_they_are(slots: Slots, room: int) -> Page:
    """The ``Store`` of slots in the dtype of their keys."""
    return Page(slots, room=room)


def measure_layer(
    slots: Slots,
    observed: Observed,
    compress: Compress,
    held_out: int,
    sink: int,
    recent: int,
    levels: Sequence[float] = LEVELS,
    observe: Observe | None = None,
) -> Curves:
    """One layer's curves: those of ``measure_rows``, pooled over the rows of the batch."""
    args = slots, observed, compress, held_out, sink, recent, levels
    (rows,) = measure_rows(*args, observe=observe)
    return pooled(rows)


def measure_rows(
    slots: Slots,
    observed: Observed,
    compress: Compress,
    held_out: int,
    sink: int,
    recent: int,
    levels: Sequence[float] = LEVELS,
    total: Callable[[Tensor], Tensor] | None = None,
    observe: Observe | None = None,
    stores: Sequence[Store] = (as_they_are,),
) -> list[list[Curves]]:
    """One layer's curves on one prompt per row, for each way to store the slots. The tokens before
    the last ``held_out`` ones are compressed by a method that has seen no later query; the held-out
    queries then attend to the slots and, causally, to their own tokens.

    ``relative`` is the larger of their error and the error on the last queries before them: the
    latter attend to few tokens that are kept unchanged, and the method has not seen the former. Of
    queries after all slots, every second one is held out instead, and all tokens are compressed.

    Args:
        slots: all tokens, ``[batch, heads, n, ...]``.
        observed: the newest queries, more than ``held_out``.
        compress: the method, in the same initial state at every call.
        held_out: number of queries, at least 1 and less than n - sink - recent.
        sink: kept unchanged, as in ``compress``.
        recent: likewise.
        levels: increasing fractions of the tokens between sinks and recent window; the last one is
            1.
        total: turns the squared norms of these heads' outputs, ``[batch]``, into those of the whole
            layer, if other processes have more heads.
        observe: updates the slots' scores by queries, once; ``compress`` then gets scored slots.
            None: ``compress`` does this at every level.
        stores: how the slots are stored.

    Returns:
        For each of ``stores``, the curves of each row.
    """
    q = observed.queries.shape[2]
    batch, heads = slots.keys.shape[:2]
    if observed.after:
        n, before, asked = slots.count, observed.every(0, 2), observed.every(1, 2)
    else:
        n = slots.count - held_out
        before, asked = observed.narrow(0, q - held_out), observed.narrow(q - held_out, held_out)
    tokens, later = slots.narrow(0, n), slots.narrow(n, slots.count - n)
    scored = tokens if observe is None or observed.after else observe(tokens, before)
    padded = slots.mass is not None
    exact = asked_of(Page.of_tokens(slots).open(), asked, padded)
    norm = exact.double().square().sum((1, 2, 3))
    norm = (norm if total is None else total(norm)).clamp(min=1e-300)
    window = WindowError(Page.of_tokens(tokens).open(), before, recent, padded)
    kept: list[float] = []
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in stores]
    for level in levels:
        budget = min(n, sink + recent + max(1, round(level * (n - sink - recent))))
        kept.append(budget / n)
        compressed = compress(scored, budget, before)
        for store, (errors, relatives) in zip(stores, found, strict=True):
            page = store(compressed, later.count)
            seen = window.error(page.open())
            if later.count:
                page.append(later)
            answer = asked_of(page.open(), asked, padded)
            wrong = (answer - exact).double().square().sum((2, 3)).view(batch, heads, -1).sum(-1)
            errors.append(wrong / norm.unsqueeze(1))
            relatives.append(torch.maximum(relative_error(exact, answer, heads), seen))
    shares = torch.tensor(kept, dtype=torch.float64, device="cpu")
    return [
        [
            Curves(error[[row]], shares, relative[[row]])
            for error, relative in [[_rounded(torch.stack(x, dim=-1).cpu()) for x in measured]]
            for row in range(batch)
        ]
        for measured in found
    ]


def _rounded(errors: Tensor) -> Tensor:
    """Errors with 17 significant bits. Sums are rounded by how wide the largest row of the batch
    is; where two budgets have the same slots, this must not decide between them."""
    mantissa, exponent = torch.frexp(errors)
    return torch.ldexp((mantissa * 2**17).round() / 2**17, exponent)


def answers(slots: Slots, later: Slots, asked: Observed) -> Tensor:
    """Attention of the queries of ``later`` over ``slots`` and, causally, over their own tokens:
    ``[batch, num_attention_heads, q, value_dim]``. A padded query gets zeros."""
    if asked.after:
        return asked_of(slots, asked)
    return asked_of(Slots.cat([replace(slots, score=None), replace(later, score=None)]), asked)


def held_out_for(tokens: int, sink: int, recent: int) -> int:
    """How many of a prompt's last queries to hold out: up to 128, a quarter of the tokens between
    sinks and recent window; 0 if these are too few to measure."""
    count = min(128, (tokens - sink - recent) // 4)
    return count if count >= 16 else 0


def least_tokens(sink: int, recent: int) -> int:
    """The number of tokens of the shortest prompt that can be measured."""
    return sink + recent + math.ceil(4 * 16)
