"""The slots of a compressed document as pages in an engine's memory, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvsketch.cache.compress import compress
from kvsketch.errors import InputError
from kvsketch.page.layout import Layout
from kvsketch.page.memory import clear
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.saved import Saved
from kvsketch.vllm.settings import PageSettings
from kvsketch.vllm.states import States


@dataclass(frozen=True)
class Converted:
    """A document as the pages of a request.

    Attributes:
        tokens: of the document.
        last: after how many of them the page counts as compressed; 0: it does not.
        rows: by the number of a layer, the bytes of its page, uint8 ``[bytes]``.
        windows: by the number of a layer with a sliding window, its last tokens, ``[1, heads, n,
            head_dim]``.
        squeezed: what did not fit and was compressed again, as a sentence; empty: nothing.
    """

    tokens: int
    last: int
    rows: dict[int, Tensor]
    windows: dict[int, Slots]
    squeezed: str

    @property
    def bytes(self) -> int:
        """Of all pages and windows."""
        windows = [t for window in self.windows.values() for t in window.tensors().values()]
        return sum(tensor.nbytes for tensor in [*windows, *self.rows.values()])


def converted(
    saved: Saved,
    layouts: Mapping[int, Layout],
    heads: slice,
    settings: PageSettings,
    context: int,
    rank: int = 0,
) -> Converted:
    """A document as pages.

    A page goes on where it was: it is compressed next when as many tokens have followed its last
    compression as in the engine. If the file lacks queries that the page would have kept by then,
    the document counts as compressed at its end. As long as a page of so many tokens would not have
    been compressed yet, the window holds all slots, and there is room for the queries before its
    first compression.

    Args:
        saved: the document, whose pages may be of any layout.
        layouts: of the engine's pages, by the number of a layer.
        heads: which KV heads they have.
        settings, context: of the engine.
        rank: of tensor parallelism, whose queries the pages keep.

    Raises:
        InputError: the heads are not those of the layouts.
        KVSketchError: slots that the method refuses.
    """
    rhythm, seen = settings.rhythm(context), saved.seen
    since = min(page.appended for page in saved.pages)
    last = seen - since if saved.compressed else 0
    asked = _asked(last, seen, settings, context)
    known = min(0 if each is None else each.shape[2] for each in saved.queries)
    early = saved.compressed and last <= rhythm.first
    if early or asked > known or _held(last, seen, rhythm) >= rhythm.slots:
        last, asked = 0 if seen <= settings.whole(context) else seen, 0
    rows, squeezed, first = {}, "", torch.zeros(1, dtype=torch.int64, device="cpu")
    for number, layout in layouts.items():
        before, page = saved.pages[number], None
        slots = _slots(before, heads, layout)
        if last:
            given = number, rhythm.first, seen - last
            page, less = _compressed(before, slots, heads, layout, settings, *given)
            squeezed = squeezed or (less and f"layer {number}: {less}")
        raw = torch.zeros(1, layout.bytes, dtype=torch.uint8, device="cpu")
        target, waiting = layout.views(raw)
        for part in target.open():
            clear(part, first)
        target.store(page or Page(slots), first)
        queries = saved.queries[number]
        if asked and queries is not None:
            own = queries[:, rank * waiting.shape[1] :][:, : waiting.shape[1], -asked:]
            waiting[:, :, :asked] = own
        rows[number] = raw[0]
    windows = {
        number: window.map(lambda tensor: tensor[:, heads])
        for number, window in saved.windows.items()
    }
    return Converted(seen, last, rows, windows, squeezed)


def page_of(
    row: Tensor, layout: Layout, last: int, seen: int, settings: PageSettings, context: int
) -> tuple[Page, Tensor]:
    """A request's page as one of a ``SketchCache`` with the same slots, and the queries that it has
    kept for its next compression. ``converted`` puts both back where they were.

    Args:
        row: its bytes in one layer, uint8 ``[bytes]``.
        layout: of the layer.
        last: after how many tokens it was last compressed; 0: it was not.
        seen: its tokens.
    """
    rhythm, method = settings.rhythm(context), settings.windowed()
    pages, waiting = layout.views(row[None])
    waiting = waiting[:, :, : _asked(last, seen, settings, context)]
    held = _held(last, seen, rhythm)
    window = {name: tensor[:, :, :held] for name, tensor in pages.exact.fields.items()}
    if not last and not bool(window["log_mass"].any()):
        del window["log_mass"]
        return Page.of_tokens(Slots(**window)), waiting
    start = rhythm.first if last else held
    sink, recent = (0, 0) if method is None else method.around
    between = int(States(np.array([last])).filled(rhythm, max(layout.middle, default=0))[0])
    page = pages.rows(torch.tensor([0], device="cpu"), start, sink, recent, between)
    if page.middle is not None:  # of heads one after the other; in 16 bits, in one part
        assert method is not None
        room, slots = page.held.cpu(), page.read(exactly=True)
        page = compress(
            page,
            slots,
            method,
            room,
            None,
            around=method.around,
            limit=room,
            room=lambda kept: 0,
            bits=layout.bits,
        )
    if held > start:
        page = page.grown(held - start)
        page.append(Slots(window["keys"][:, :, start:], window["values"][:, :, start:]))
    return page, waiting


def _held(last: int, seen: int, rhythm: Rhythm) -> int:
    """Slots in use in the window."""
    return int(States(np.array([last])).held(rhythm, np.array([seen]))[0])


def _asked(last: int, seen: int, settings: PageSettings, context: int) -> int:
    """How many queries a page has kept for its next compression."""
    rhythm = settings.rhythm(context)
    return max(0, _held(last, seen, rhythm) - rhythm.slots + settings.queries(context))


def _slots(page: Page, heads: slice, layout: Layout) -> Slots:
    """The slots of some heads, as exactly as they are stored, with scores."""
    slots = page.read(exactly=True).map(lambda tensor: tensor[:, heads])
    found = (slots.keys.shape[1], slots.keys.shape[3], slots.values.shape[3])
    if found != (layout.heads, layout.head_dim, layout.value_dim):
        raise InputError(f"the file has heads of another shape {found} than the model's pages")
    if slots.score is None:
        slots = replace(
            slots, score=torch.zeros(slots.keys.shape[:3], dtype=torch.float32, device="cpu")
        )
    return replace(slots, positions=None)


def _compressed(
    before: Page,
    slots: Slots,
    heads: slice,
    layout: Layout,
    settings: PageSettings,
    number: int,
    first: int,
    since: int,
) -> tuple[Page, str]:
    """The page after a compression to the sizes of the layout, and what it lost.

    Args:
        before: the page of these slots in the file.
        number: of the layer.
        first: slots in the window after a compression.
        since: tokens in the window since then.
    """
    room = torch.full(slots.keys.shape[:2], first + since, device="cpu")
    if layout.middle:
        room += layout.sizes(1, torch.device("cpu"))
    live = (slots.masses() != 0).sum(-1)
    method, lost = settings.windowed(number), ""
    assert method is not None  # nothing else compresses
    sink, recent = method.around
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
        around=(sink, recent + since),
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
