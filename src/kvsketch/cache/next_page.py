"""The page that follows a compression."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.page import Page
from kvsketch.cache.quantized_page import QuantizedPage
from kvsketch.cache.sketch_page import SketchPage, SketchPages, by_budget, next_page
from kvsketch.cache.storage import FULL, Bits
from kvsketch.cache.tokens import Tokens
from kvsketch.cache.window import Windowed
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.slots import Slots

#: The page of a layer after a compression.
Held = Page | QuantizedPage | SketchPage | SketchPages


def sizes_of(before: Slots, budget: Tensor, kept: Slots) -> Tensor | None:
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


def of_slots(
    before: Tokens | Held,
    kept: Slots,
    sizes: Tensor | None,
    room: int,
    method: Windowed,
    bits: Bits,
) -> Page | QuantizedPage:
    """The page of the slots that a compressor kept.

    Args:
        before: the layer's slots before.
        kept: ``[batch, heads, n, ...]``.
        sizes: as for ``Page``.
        room: slots that can be appended to every head.
        method: its sinks and recent window stay in full precision.
        bits: of the slots between these.
    """
    if bits != FULL:
        previous = before if isinstance(before, QuantizedPage) else None
        return QuantizedPage(kept, sizes, room, bits, method.sink, method.recent, previous)
    return (
        before.refilled(kept, sizes, room) if isinstance(before, Page) else Page(kept, sizes, room)
    )


def of_sketches(
    before: Tokens | Held,
    visible: Slots,
    method: WindowedSketch,
    budgets: HeadBudgets,
    budget: int | Tensor,
    limit: int | Tensor,
    room: int,
) -> SketchPage | SketchPages:
    """The page around sketches, which take in the tokens between sinks and recent window.

    Args:
        before: what the layer held; ``visible``: as slots, padding dead.
        budgets: of every head.
        budget: slots to compress to now.
        limit: the budgets now.
        room: tokens that can be appended above these.
    """
    if isinstance(budget, int):
        assert isinstance(limit, int)
        exact = before.exact if isinstance(before, SketchPage) else visible
        return next_page(method, exact, budget, limit, room)
    pages = before if isinstance(before, SketchPages) else visible
    return by_budget(method, budgets, pages, budget, torch.as_tensor(limit), room)
