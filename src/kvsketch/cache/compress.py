"""Compression of a page, wherever its memory is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.kernels.exchange import lowest as lowest_of
from kvsketch.methods.base import Compressor, check_input
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.slots import Slots

# Where only the newest tokens are compressed: how many slots of a head are reduced together, at
# least and for each of the tokens, and the least size of a page, in so many of the former.
_TOGETHER, _PER_TOKEN, _SMALL = 256, 6, 2


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
    decoding: bool = True,
) -> Page:
    """The next page of a layer.

    Args:
        page: the page before, which must not be used afterwards.
        slots: its slots, scored if the method has scores.
        budget: slots per KV head, or of every head, int64 ``[batch, num_key_value_heads]``.
        observed: the queries that were scored.
        around: numbers of first and of last tokens that stay unchanged.
        limit: in few bits, heads that hold at most so many slots keep all of them.
        room: from the number of slots of the largest head to the number that can be appended to
            every head.
        bits: of the slots between sinks and recent tokens.
        apart: these slots are a part of their own in any number of bits.
        decoding: see ``Compressor.compress``.
    """
    held, sizes = page.held.cpu(), None
    fits = held <= limit
    if bits != FULL and (bool(fits.all()) or isinstance(limit, Tensor)):
        less = held.clamp(max=budget)
        budget = torch.where(fits, held, less)  # what fits is only stored in fewer bits
    elif page.sizes is not None:
        budget = held.clamp(max=budget)
    # Also where nothing is reduced: of every head its own slots come first.
    sink, recent = around
    window = {"sink": sink, "recent": recent}
    kept = method.compress(slots, budget, observed, **window, scored=True, decoding=decoding)
    if isinstance(budget, Tensor):
        sizes = _sizes_of(slots, budget, kept)
    return Page(kept, sizes, room(kept.count), bits, sink, recent, page, apart)


@dataclass(frozen=True)
class Newest:
    """What becomes of the tokens of a page in few bits that have left the recent window while it
    decodes, by a method that is ``local``: all slots but those of the lowest scores keep their
    bits, and are not read.

    Attributes:
        page: the page, with scores.
        around: numbers of first and of last tokens that stay unchanged.
        left: how many tokens have left the recent window.
        lowest: how many slots of every head, those of the lowest scores, are reduced together with
            these tokens, int64 ``[batch, heads]`` on the CPU.
        fewer: how many fewer all of these are afterwards, likewise.
        room: the number of slots that can be appended afterwards.
    """

    page: Page
    around: tuple[int, int]
    left: int
    lowest: Tensor
    fewer: Tensor
    room: int

    @staticmethod
    def of(
        page: Page, budget: int | Tensor, *, around: tuple[int, int], room: int
    ) -> Newest | None:
        """What becomes of the tokens with these arguments of ``compress``. None: the page is small,
        or too much of it must go, and ``compress`` has to read all of it."""
        middle, exact, (sink, recent) = page.middle, page.exact, around
        left, window = exact.count - sink - recent, sink + recent
        if middle is None or not middle.packed or "score" not in middle.fields:
            return None
        if exact.sizes is not None or left < 1:
            return None
        if exact.appended != left or middle.count < _SMALL * _TOGETHER:
            return None
        held = middle.held.cpu()
        fewer = (held + left + window - budget).clamp(min=0)
        most = max(_TOGETHER, _PER_TOKEN * left)
        # One round of merging halves them: more where more must go, and all of a small head.
        some = (2 * fewer).clamp(min=most, max=4 * most)
        lowest = torch.minimum(held, torch.where(fewer > 0, some - left, 0))
        much = (2 * fewer > lowest + left) & (lowest < held)
        if bool((much | (fewer > lowest + left)).any()):
            return None
        return Newest(page, around, left, lowest, fewer, room)

    @property
    def kind(self) -> Hashable:
        """Pages of the same kind can be compressed at once."""
        fields, middle = self.page.exact.fields, self.page.middle
        assert middle is not None
        few = [(one.bits, one.dim) for one in middle.packed.values()]
        keys = fields["keys"]
        alike = keys.shape[:2], keys.dtype, keys.device, self.around, self.left
        return (*alike, tuple(fields), tuple(middle.fields), *few)

    @property
    def nbytes(self) -> int:
        """Of what is copied."""
        assert self.page.middle is not None
        return sum(tensor.nbytes for tensor in self.page.middle.contents())


def compress_newest(method: Compressor, newest: Sequence[Newest]) -> Sequence[Page | None]:
    """The next pages of layers.

    Args:
        method: one that is ``local``, which draws no random numbers.
        newest: of pages of the same kind, which must not be used afterwards.

    Returns:
        None for a page that ``compress`` must reduce, because there is padding, or because the
        tokens are too far from all others for the bits of these.
    """
    method = method.without_numbers()
    pages, (sink, recent) = [one.page for one in newest], newest[0].around
    left, middles = newest[0].left, [page.middle for page in pages if page.middle is not None]
    lowest, fewer = (torch.cat([getattr(x, n) for x in newest]) for n in ("lowest", "fewer"))
    exact = {name: _rows(pages, name) for name in pages[0].exact.fields}
    device = exact["keys"].device
    old = lowest_of(middles, lowest.to(device))
    batch, heads, tokens_each, _ = exact["keys"].shape
    tokens = Part.over(exact, {}, (batch, heads, tokens_each)).read(torch.float32)
    together = tokens.narrow(sink, left)
    if bool(lowest.any()):
        together = Slots.cat([together, old.slots])  # dead slots are last
    live = together.live()
    if live is not None and bool((live.sum(-1).cpu() < lowest + left).any()):
        return [None] * len(newest)  # padding, which ``compress`` removes
    count = lowest + left - fewer
    wanted = torch.where(count > 0, count, lowest + left)  # no method reduces a head to nothing
    if not bool(fewer.any()):
        kept = together
    elif method.ragged and bool((fewer > 0).all()):
        check_input(together, wanted)
        kept = method.reduce(together, wanted.to(device), False)
    else:
        kept = method.compress(together, wanted, sink=0, recent=0, scored=True, decoding=True)
    if method.keeps_tokens and not any("log_mass" in part.fields for part in middles):
        kept = replace(kept, mass=None)  # which says no more than the numbers do
    between = old.exchanged(kept, count.to(device))
    end = Slots.cat([tokens.narrow(0, sink), tokens.narrow(sink + left, recent)])
    batch = len(newest[0].lowest)
    ends = [end.map(functools.partial(_rows_of, i * batch, batch)) for i in range(len(newest))]
    found: list[Page | None] = []
    for one, middle, mine in zip(newest, between, ends, strict=True):
        page = one.page
        if middle is None:
            found.append(None)
            continue
        part = page.exact.refilled(mine, None, one.room, page.dtype)
        found.append(page.with_parts(part, middle))
    return found


def _rows_of(start: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + count]


def _rows(pages: Sequence[Page], name: str) -> Tensor:
    """A field of the exact slots of all pages."""
    fields = [page.exact.even(name) for page in pages]
    return fields[0] if len(fields) == 1 else torch.cat(fields)


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
