"""Attention over what a compressed layer holds: by rows, by groups of heads, over slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache import HeadGroups, Periodic, RowGroups
from ..errors import UnsupportedError
from ..kernels import attend_one
from ..slots import Slots, attend, causal
from .masks import View, over_slots

_FULL_PRECISION = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Asked:
    """The newest tokens' queries, and what turns them into scores.

    Attributes:
        queries: ``[batch, num_attention_heads, q, head_dim]``.
        scaling: multiplies ``<q, k>``.
        softcap: of the scores.
        slopes: ``[num_attention_heads]``, of ALiBi.
        sinks: ``[num_attention_heads]``, logits of attention sinks.
        exactly: the model's own kernel for one query over exact tokens that are all visible:
            keys and values to ``[batch, num_attention_heads, 1, value_dim]``; None: there is none.
        counted: add the attention received to ``slots.score`` while attending.
    """

    queries: Tensor
    scaling: float
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    exactly: Callable[[Tensor, Tensor], Tensor] | None = None
    counted: bool = False

    @property
    def counts(self) -> bool:
        """Whether ``attend_compressed`` adds attention to scores: a lone query, as ``attend_one``
        takes it."""
        plain = self.softcap is None and self.slopes is None
        one = self.queries.shape[2] == 1 and self.queries.dtype in _FULL_PRECISION
        return self.counted and plain and one


def attend_compressed(
    asked: Asked, sketch: Periodic | HeadGroups | RowGroups, view: View
) -> tuple[Tensor, bool]:
    """Attention of the newest tokens over slots and over themselves.

    Args:
        sketch: what the layer holds, the newest tokens included.
        view: what the model's mask says.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]``, and whether scores were added to.

    Raises:
        UnsupportedError: a mask that slots cannot honour.
    """
    if isinstance(sketch, RowGroups):
        apart = replace(asked, exactly=None, counted=False)
        return sketch.assemble(
            [
                attend_compressed(replace(apart, queries=part), g.driver, view.rows(g.rows))[0]
                for part, g in zip(sketch.split(asked.queries), sketch.groups, strict=True)
            ]
        ), False
    if isinstance(sketch, HeadGroups):
        return _by_heads(asked, sketch, view), False
    return _over_slots(asked, sketch, view)


def _by_heads(asked: Asked, sketch: HeadGroups, view: View) -> Tensor:
    if any(mask is not None and mask.shape[1] > 1 for mask in (view.hidden, view.chunk)):
        raise UnsupportedError(
            "attention_mask differs from head to head, which a cache with a budget of its own for "
            "every head does not honour; use allocation='even'"
        )
    parts = zip(
        sketch.split(asked.queries),
        sketch.split_heads(asked.slopes),
        sketch.split_heads(asked.sinks),
        sketch.drivers,
        strict=True,
    )
    apart = replace(asked, exactly=None, counted=False)
    return sketch.assemble(
        [
            _over_slots(replace(apart, queries=q, slopes=slopes, sinks=sinks), driver, view)[0]
            for q, slopes, sinks, driver in parts
        ]
    )


def _over_slots(asked: Asked, driver: Periodic, view: View) -> tuple[Tensor, bool]:
    slots, (_, heads, q, _) = driver.visible, asked.queries.shape
    plain = asked.softcap is None and asked.slopes is None
    lean = q == 1 and plain and view.hidden is None and not view.shown
    lean = lean and not (driver.padded or driver.compressor.split_sums)
    if lean and asked.queries.dtype in _FULL_PRECISION:
        score = slots.score if asked.counts else None
        if slots.mass is not None or score is not None or asked.exactly is None:
            out = attend_one(
                asked.queries, slots, scaling=asked.scaling, score=score, sinks=asked.sinks
            )
            return out, score is not None
    if lean and slots.mass is None and asked.exactly is not None and not asked.counts:
        return asked.exactly(slots.keys, slots.values), False
    out = attend(
        asked.queries,
        slots,
        scaling=asked.scaling,
        softcap=asked.softcap,
        mask=_mask(view, slots, heads, q),
        slopes=asked.slopes,
        sinks=asked.sinks,
    )
    return out, False


def _mask(view: View, slots: Slots, heads: int, q: int) -> Tensor | None:
    """What ``view`` says as a mask over slots, the newest ``q`` of them last; None: all visible."""
    device, old = slots.keys.device, slots.narrow(0, slots.count - q)
    earlier = over_slots(view, heads, old.positions, old.mass)
    if earlier is None and view.chunk is None:
        return causal(q, slots.count, device) if q > 1 else None
    chunk = causal(q, q, device) if view.chunk is None else view.chunk
    if earlier is None:
        earlier = torch.ones(1, 1, q, old.count, dtype=torch.bool, device=device)
    rows, wide = (max(earlier.shape[i], chunk.shape[i]) for i in (0, 1))
    return torch.cat([part.expand(rows, wide, q, -1) for part in (earlier, chunk)], dim=-1)
