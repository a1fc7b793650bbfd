"""Retrieval heads, which keep all tokens, and streaming heads, which do not: DuoAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.errors import InputError


@dataclass(frozen=True)
class RetrievalHeads:
    """A score for each KV head of a model, for ``SketchCache(allocation=...)``: the heads of
    highest score are retrieval heads, which keep every token. The others are streaming heads, which
    keep sinks and recent window (DuoAttention, arXiv:2410.10819, section 2.2).

    The cache's ``budget`` is then the fraction of retrieval heads, a float in (0, 1], like one
    minus kvpress's ``head_compression_ratio``; the cache's method has no effect. Of n tokens, the
    cache keeps the fraction ``budget`` + (1 - ``budget``) (sink + recent) / n.

    Args:
        scores: float ``[layers, num_key_value_heads]``, for the layers that a ``SketchCache``
            compresses, in their order: from ``kvsketch.measure_heads``, or DuoAttention's own
            trained scores.

    Raises:
        InputError: scores of another shape, or not finite.
    """

    scores: Tensor

    def __post_init__(self) -> None:
        if self.scores.dim() != 2 or not bool(torch.isfinite(self.scores).all()):
            raise InputError(
                f"scores {tuple(self.scores.shape)} must be finite numbers, one for each layer and "
                "KV head: [layers, num_key_value_heads]"
            )

    def streaming(self, share: float) -> Tensor:
        """The streaming heads if a fraction ``share`` are retrieval heads, bool ``[layers,
        heads]``: those of lowest score; their number is rounded."""
        count = round(self.scores.numel() * (1 - share))
        found = torch.zeros(self.scores.numel(), dtype=torch.bool, device="cpu")
        found[self.scores.flatten().argsort(stable=True)[:count].cpu()] = True
        return found.view(self.scores.shape)

    def budgets(self, share: float, window: int, layers: int, heads: int) -> list[HeadBudgets]:
        """The budgets of every layer.

        Args:
            share: fraction of retrieval heads.
            window: slots of a streaming head: sinks and recent window.
            layers, heads: how many the model has.

        Raises:
            InputError: the scores are for other heads, or there is no window.
        """
        if self.scores.shape != (layers, heads):
            found = tuple(self.scores.shape)
            raise InputError(
                f"allocation: the scores are for {found[0]} layers x {found[1]} KV heads, the "
                "model "
                f"compresses {layers} x {heads}"
            )
        if window < 1:
            raise InputError(
                "allocation: streaming heads keep sinks and recent window, so sink + recent must "
                f"be at least 1, not {window}"
            )
        whole, part = Budget(1.0), Budget(1.0, limit=window)
        # Alike by chance, as those that were measured; the average tells how often to compress.
        return [
            HeadBudgets([[part if x else whole for x in row]], bound=share, measured=True)
            for row in self.streaming(share).tolist()
        ]


def share_of_heads(budget: int | float | None, **others: Any) -> Budget:
    """The fraction of retrieval heads that a budget means.

    Args:
        budget: a fraction; None: one half.
        others: other arguments that allocate a budget; None if not given.

    Raises:
        InputError: a budget that is not a fraction, or another argument that is given.
    """
    share = Budget(0.5 if budget is None else budget)
    if not share.is_fraction:
        raise InputError(
            f"budget={budget!r} is the fraction of retrieval heads with allocation=RetrievalHeads: "
            "a "
            "float in (0, 1]"
        )
    for name, given in others.items():
        if given is not None:
            raise InputError(
                f"allocation=RetrievalHeads and {name}={given!r} exclude each other: omit one of "
                "them"
            )
    return share
