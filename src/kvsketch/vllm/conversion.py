"""The slots of a compressed document as pages in an engine's memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.cache.compress import compress
from kvsketch.errors import InputError
from kvsketch.page.layout import Layout
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.settings import PageSettings


@dataclass(frozen=True)
class Converted:
    """A document as the pages of a request.

    Attributes:
        tokens: of the document.
        last: after how many of them the page counts as compressed; 0: it does not.
        rows: by the number of a layer, the bytes of its page, uint8 ``[bytes]``.
        squeezed: what did not fit and was compressed again, as a sentence; empty: nothing.
    """

    tokens: int
    last: int
    rows: dict[int, Tensor]
    squeezed: str

    @property
    def bytes(self) -> int:
        """Of all pages."""
        return sum(row.numel() for row in self.rows.values())


def converted(
    seen: int,
    pages: Sequence[Page],
    layouts: Mapping[int, Layout],
    heads: slice,
    settings: PageSettings,
    context: int,
) -> Converted:
    """A document as pages.

    As long as a page of so many tokens would not have been compressed yet, and has room for the
    queries before its first compression, the window holds all slots. Otherwise they are where they
    are after a compression.

    Args:
        seen: tokens of the document.
        pages: of every layer of the model, in any layout; of one row.
        layouts: of the engine's pages, by the number of a layer.
        heads: which KV heads they have.
        settings, context: of the engine.

    Raises:
        InputError: the heads are not those of the layouts.
        KVSketchError: slots that the method refuses.
    """
    whole, rhythm = seen <= settings.whole(context), settings.rhythm(context)
    rows, squeezed = {}, ""
    for number, layout in layouts.items():
        slots = _slots(pages[number], heads, layout)
        if whole:
            page = Page(slots)
        else:
            page, less = _compressed(pages[number], slots, heads, layout, settings, number, rhythm)
            squeezed = squeezed or (less and f"layer {number}: {less}")
        raw = torch.zeros(1, layout.bytes, dtype=torch.uint8)
        target, _ = layout.views(raw)
        for part in target.open():
            part.clear(torch.zeros(1, dtype=torch.int64))
        target.store(page, torch.zeros(1, dtype=torch.int64))
        rows[number] = raw[0]
    return Converted(seen, 0 if whole else seen, rows, squeezed)


def _slots(page: Page, heads: slice, layout: Layout) -> Slots:
    """The slots of some heads, as exactly as they are stored, with scores."""
    slots = page.read(exactly=True).map(lambda tensor: tensor[:, heads])
    found = (slots.keys.shape[1], slots.keys.shape[3], slots.values.shape[3])
    if found != (layout.heads, layout.head_dim, layout.value_dim):
        raise InputError(f"the file has heads of another shape {found} than the model's pages")
    if slots.score is None:
        slots = replace(slots, score=torch.zeros(slots.keys.shape[:3]))
    return replace(slots, positions=None)


def _compressed(
    before: Page,
    slots: Slots,
    heads: slice,
    layout: Layout,
    settings: PageSettings,
    number: int,
    rhythm: Rhythm,
) -> tuple[Page, str]:
    """The page after a compression to the sizes of the layout, and what it lost.

    Args:
        before: the page of these slots in the file.
        number: of the layer.
    """
    room = torch.full(slots.keys.shape[:2], rhythm.first)
    if layout.middle:
        room += layout.sizes(1, torch.device("cpu"))
    live = (slots.masses() != 0).sum(-1)
    method, lost = settings.windowed(number), ""
    assert method is not None  # nothing else compresses
    if bool((live > room).any()):
        over = int((live - room).argmax())
        lost = f"{int(live.flatten()[over]):,} slots for {int(room.flatten()[over]):,} in a page"
    own = _bits(before)
    page = compress(
        _as_page(slots, live, before, heads),
        slots,
        method,
        room,
        None,
        around=method.around,
        limit=room,
        room=lambda kept: 0,
        bits=layout.bits,
        apart=bool(layout.middle),
    )
    if layout.bits < own and page.middle is not None:
        lost = lost or f"slots in {own} bits for {layout.bits} in a page"
    return page, lost


def _bits(page: Page) -> Bits:
    """The bits of the slots in the middle of a page."""
    packed = {} if page.middle is None else page.middle.packed
    return Bits(*(packed[name].bits for name in ("keys", "values"))) if packed else FULL


def _as_page(slots: Slots, live: Tensor, before: Page, heads: slice) -> Page:
    """What ``compress`` has to know of the page from which slots of some heads were read: how many
    there are, and the centres and units of slots in few bits, with which they keep their bits."""
    batch, count = live.shape
    part = Part.over({"keys": slots.keys}, {}, (batch, count, slots.count), live)
    part.grows = True  # it is not written into
    middle = None
    if before.middle is not None and before.middle.packed:
        middle = copy.copy(before.middle)
        middle.sizes = torch.zeros_like(live)  # they are counted already
        middle.packed = {
            name: replace(
                few,
                unit=few.unit[:, heads],
                offset=None if few.offset is None else few.offset[:, heads],
            )
            for name, few in before.middle.packed.items()
        }
    page = Page.of_parts(part, middle)
    page.sizes = live
    return page
