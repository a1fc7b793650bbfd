"""Compression of a page, wherever its memory is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.methods.base import Compressor
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits
from kvsketch.slots import Slots


def compress(
    page: Page,
    slots: Slots,
    method: Compressor,
    budget: int | Tensor,
    observed: Observed | None,
    *,
    around: tuple[int, int],
    limit: int | Tensor,
    room: Callable[[int], int],
    bits: Bits = FULL,
    apart: bool = False,
    fit: bool = False,
) -> Page:
    """The next page of a layer.

    Args:
        page: the page before, which must not be used afterwards.
        slots: its slots, scored if the method has scores.
        budget: slots per KV head, or of every head, int64 ``[batch, num_key_value_heads]``.
        observed: the queries that were scored, to which a method may fit.
        around: numbers of first and of last tokens that stay unchanged.
        limit: in few bits, heads that hold at most so many slots keep all of them.
        room: from the number of slots of the largest head to the number that can be appended to
            every head.
        bits: of the slots between sinks and recent tokens.
        apart: these slots are a part of their own in any number of bits.
        fit: see ``Compressor.compress``.
    """
    held, sizes = page.held.cpu(), None
    fits = held <= torch.as_tensor(limit)
    if bits != FULL and (bool(fits.all()) or isinstance(limit, Tensor)):
        less = torch.minimum(torch.as_tensor(budget), held)
        budget = torch.where(fits, held, less)  # what fits is only stored in fewer bits
    elif page.sizes is not None:
        budget = torch.minimum(torch.as_tensor(budget), held)
    # Also where nothing is reduced: of every head its own slots come first.
    sink, recent = around
    kept = method.compress(slots, budget, observed, sink=sink, recent=recent, scored=True, fit=fit)
    if isinstance(budget, Tensor):
        sizes = _sizes_of(slots, budget, kept)
    return Page(kept, sizes, room(kept.count), bits, sink, recent, page, apart)


def scored(method: Compressor, slots: Slots, asked: Observed, again: Observed | None) -> Slots:
    """Slots with scores.

    Args:
        method: one that has scores.
        slots: as left by the compression before, with the tokens since then.
        asked: the last queries.
        again: at the end of a piece of a prompt, all of its queries, asked again after it: the
            largest score of any piece counts.
    """
    if again is None:
        return method.observe(slots, asked)
    before = slots.score
    found = method.echo(method.observe(replace(slots, score=None), asked), again, None, alone=False)
    assert found.score is not None
    if before is None:
        return found
    return replace(slots, score=torch.maximum(before, found.score))


def _sizes_of(before: Slots, budget: Tensor, kept: Slots) -> Tensor | None:
    """The number of slots of every head, in the result of ``Compressor.compress``.

    Args:
        before: the slots before the compression.
        budget: of every head, int64 ``[batch, heads]``.
        kept: the slots after it.

    Returns:
        int64 ``[batch, heads]``; None: all have the same number.
    """
    live = before.live()
    most = torch.full_like(budget, before.count) if live is None else live.sum(-1).cpu()
    sizes = torch.where(budget >= before.count, before.count, torch.minimum(budget, most))
    return None if bool((sizes == kept.count).all()) else sizes.to(kept.keys.device)
