"""The page that follows a compression."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.sketch_page import SketchPage, SketchPages, by_budget, next_page, tokens_of
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.page.page import Page
from kvsketch.slots import Slots

#: The page of a layer after a compression.
Held = Page | SketchPage | SketchPages


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


def of_sketches(
    before: Held,
    visible: Slots,
    method: WindowedSketch,
    budgets: HeadBudgets,
    budget: int | Tensor,
    limit: int | Tensor,
    room: int,
) -> SketchPage | SketchPages:
    """The page around sketches, which take in the tokens between sinks and recent window.

    Args:
        before: what the layer held; ``visible``: as slots.
        budgets: of every head.
        budget: slots to compress to now.
        limit: the budgets now.
        room: tokens that can be appended above these.
    """
    if isinstance(budget, int):
        assert isinstance(limit, int)
        exact = before.tokens if isinstance(before, SketchPage) else tokens_of(visible)
        return next_page(method, exact, budget, limit, room)
    pages = before if isinstance(before, SketchPages) else tokens_of(visible)
    return by_budget(method, budgets, pages, budget, torch.as_tensor(limit), room)
