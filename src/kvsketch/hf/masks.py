"""Translates an attention mask for a compressed cache.

Masks cover all tokens seen, as for an uncompressed cache. While a layer is uncompressed, the
model's own kernel applies them. Afterwards a column of the mask need not correspond to a slot, so
the mask is split in two: the part among the new tokens, which is applied unchanged, and the earlier
tokens that are masked (padding, which was never kept, or tokens that are masked only now).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from kvsketch.errors import UnsupportedError
from kvsketch.observed import causal
from kvsketch.slots import Slots

# Additive masks mask with the lowest number of their dtype, or half of it (several are summed).
_HIDES = 0.4


@dataclass(frozen=True)
class View:
    """One forward's mask.

    Attributes:
        live: bool ``[batch, tokens]``: all tokens so far, False for padding; None: all are real.
        newest: bool ``[batch, q]``: the part for the new tokens; None: all new tokens are real.
        chunk: bool ``[batch, 1 or num_attention_heads, q, q]``: which of the new tokens each of
            them attends to; None: causal, except padding.
        hidden: bool ``[batch, 1 or num_attention_heads, q, earlier tokens]``: earlier tokens, not
            padding, that a query may not attend to; None: none.
        shown: number of earlier tokens that were padding when they came and are visible now.
        causal: bool ``[batch, q]``: the real queries that attend to all real tokens up to their
            own, as ``Observed`` requires; None: all do.
    """

    live: Tensor | None = None
    newest: Tensor | None = None
    chunk: Tensor | None = None
    hidden: Tensor | None = None
    shown: int = 0
    causal: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the new tokens attend to all earlier ones and, causally, to each other, except
        padding."""
        return self.hidden is None and self.chunk is None and not self.shown


PLAIN = View()


class Masks:
    """Reads the masks of one stream, once per forward and not once per layer.

    Attributes:
        live: bool ``[batch, tokens]`` of the tokens seen, False for padding; None: all are real.
        settled: whether tokens were compressed: padding then stays padding. Before that, the newest
            mask decides.
    """

    def __init__(self) -> None:
        self.live: Tensor | None = None
        self.settled = False
        self._last: tuple[Any, int, View] | None = None

    def read(self, mask: Any, batch: int, q: int, seen: int) -> View:
        """Read ``mask``.

        Args:
            mask: the mask that the model passes to its kernel: None, bool or additive ``[batch, 1
                or num_attention_heads, q, tokens]``, bool ``[batch, tokens]`` (FlashAttention), or
                a flex attention BlockMask.
            batch: rows.
            q: new tokens.
            seen: tokens so far, the new ones included.

        Raises:
            UnsupportedError: a mask that cannot be read, or one that adds numbers to scores.
        """
        if mask is None and self.live is None:
            return PLAIN
        if self._last is not None and self._last[0] is mask and self._last[1] == seen:
            return self._last[2]
        visible = _visible(mask, batch, q, seen)
        view = self._unmasked(q, seen) if visible is None else self._masked(visible, q, seen)
        self.live = view.live
        self._last = (mask, seen, view)
        return view

    @property
    def blank(self) -> bool:
        """Whether all tokens seen are padding, as in the first chunk of a long padded prompt."""
        return not self.settled and self.live is not None and not bool(self.live.any())

    def _before(self, seen: int, like: Tensor) -> Tensor:
        """The tokens known so far, ``[batch, seen]``; those not known yet are real."""
        before = torch.ones(like.shape[0], seen, dtype=torch.bool, device=like.device)
        if self.live is not None:
            before[:, : self.live.shape[1]] = self.live.to(like.device)
        return before

    def _unmasked(self, q: int, seen: int) -> View:
        if not self.settled or self.live is None:
            return PLAIN
        before = self._before(seen, self.live)
        before[:, -q:] = True
        return View(live=before, shown=int((~before).sum()))

    def _masked(self, visible: Tensor, q: int, seen: int) -> View:
        old = seen - q
        # A token is real if any query attends to it: in a tree of tokens, the last attends to one
        # branch.
        row = visible if visible.dim() == 2 else visible.any(1).any(1)
        before = row.clone()
        if self.settled:  # what was padding then was not kept
            before[:, :old] = self._before(seen, row)[:, :old]
        live, new = before[:, :old], before[:, old:]
        shown = int((row[:, :old] & ~live).sum())
        if visible.dim() == 2:
            chunk = causal = None
            hidden = (live & ~row[:, :old])[:, None, None, :]
        else:
            # a padded query attends to nothing, which masks no token
            hidden = live[:, None, None] & ~visible[..., :old] & new[:, None, :, None]
            plain = torch.ones(q, q, dtype=torch.bool, device=row.device).tril()
            same = ((plain & new[:, None, None]) == visible[..., old:]) | ~new[:, None, :, None]
            chunk = None if bool(same.all()) else visible[..., old:]
            causal = (same.all(-1) & ~hidden.any(-1)).all(1) & new
        all_new, all_hidden = bool(new.all()), bool(hidden.any())
        if visible.dim() == 2 and not all_new:
            causal = new
        return View(
            live=None if bool(before.all()) else before,
            newest=None if all_new else new,
            chunk=chunk,
            hidden=hidden if all_hidden else None,
            shown=shown,
            causal=None if causal is None or bool(causal.all()) else causal,
        )

    def forget(self) -> None:
        """The forward is over: release its mask."""
        self._last = None

    def reset(self) -> None:
        self.live = self._last = None
        self.settled = False

    def cut(self, tokens: int) -> None:
        """Keep only the first ``tokens`` tokens."""
        self._last = None
        if self.live is not None:
            self.live = self.live[:, :tokens] if tokens else None

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """With ``fn``, which acts on axis 0, applied."""
        self._last = None
        self.live = None if self.live is None else fn(self.live)


def _visible(mask: Any, batch: int, q: int, seen: int) -> Tensor | None:
    """bool ``[batch, heads, q, seen]``, or ``[batch, seen]`` of padding alone; None: all visible.

    Raises:
        UnsupportedError: see ``Masks.read``.
    """
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        device = str(mask.kv_indices.device)
        return create_mask(mask.mask_mod, batch, 1, q, seen, device=device)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != seen:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"attention_mask={shape}: SketchCache reads masks over all {seen} tokens seen, "
            "[batch, tokens] or [batch, heads, q, tokens]"
        )
    if mask.dim() == 2:
        return mask.bool().expand(batch, seen)
    if mask.dtype == torch.bool:
        return mask.expand(batch, -1, -1, -1)
    if not mask.is_floating_point():
        raise UnsupportedError(
            f"attention_mask is {mask.dtype}: with 4 axes, SketchCache reads masks that are bool "
            "(True: visible) or floating (added to the scores)"
        )
    hides = mask < _HIDES * torch.finfo(mask.dtype).min
    if not bool((hides | (mask == 0)).all()):
        raise UnsupportedError(
            "attention_mask adds numbers to the attention scores (a position bias?), which a "
            "compressed cache cannot apply to its slots; use DynamicCache for this model"
        )
    return (~hides).expand(batch, -1, -1, -1)


def over_slots(
    view: View, heads: int, positions: Tensor | None, mass: Tensor | None
) -> Tensor | None:
    """``view.hidden`` as a mask over the slots held before the new tokens.

    Args:
        view: the mask.
        heads: num_attention_heads.
        positions: ``[batch, num_key_value_heads, slots]`` of the slots held, if they are known.
        mass: of the slots, same shape; None: all are exact tokens.

    Returns:
        bool ``[batch, num_attention_heads, q, slots]``, True where a query may attend. None:
        everything is visible.

    Raises:
        UnsupportedError: tokens that are masked now may be part of a slot, or their slots are not
            known; or tokens that were padding when they came are visible now.
    """
    if view.shown:
        raise UnsupportedError(
            f"attention_mask unmasks {view.shown} tokens that it masked when they came; the "
            "compressed cache has dropped them. Give the same mask for earlier tokens"
        )
    if view.hidden is None:
        return None
    count = int(view.hidden.any(1).any(1).sum())
    hides = f"attention_mask hides {count} tokens that it showed before they were compressed"
    if positions is None:
        raise UnsupportedError(
            f"{hides}, and this cache does not know which slots they are: make it with "
            "keep=['positions'] and a method that keeps tokens as they are"
        )
    if mass is not None and not bool(((mass == 0) | (mass == 1)).all()):
        raise UnsupportedError(
            f"{hides}: they may be part of slots that represent several tokens. Use a method that "
            "keeps tokens as they are, such as snapkv or streaming_llm"
        )
    batch, kv_heads = positions.shape[:2]
    hidden = view.hidden.expand(batch, heads, -1, -1)
    index = positions.long().repeat_interleave(heads // kv_heads, dim=1).unsqueeze(2)
    return ~hidden.gather(3, index.expand(-1, -1, hidden.shape[2], -1))


def mask_over(view: View, slots: Slots, heads: int, q: int) -> Tensor | None:
    """``view`` as a mask over slots, the newest ``q`` of them last.

    Args:
        view: the model's mask.
        slots: all slots that are attended to.
        heads: num_attention_heads.
        q: new tokens.

    Returns:
        bool, broadcastable to ``[batch, num_attention_heads, q, slots]``, True where a query may
        attend; None: everything before it.

    Raises:
        UnsupportedError: see ``over_slots``.
    """
    device, old = slots.keys.device, slots.narrow(0, slots.count - q)
    earlier = over_slots(view, heads, old.positions, old.mass)
    if earlier is None and view.chunk is None:
        return None
    chunk = causal(q, q, device) if view.chunk is None else view.chunk
    if earlier is None:
        earlier = torch.ones(1, 1, q, old.count, dtype=torch.bool, device=device)
    rows, wide = (max(earlier.shape[i], chunk.shape[i]) for i in (0, 1))
    return torch.cat([part.expand(rows, wide, q, -1) for part in (earlier, chunk)], dim=-1)
