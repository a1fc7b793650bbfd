"""Compression of several layers after the same decoded token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from kvsketch.cache.compress import Newest, compress_newest
from kvsketch.methods.base import Compressor
from kvsketch.page.page import Page
from kvsketch.pieces import at_once

# Slots of more bytes are not copied at once. A layer that has more takes so long that nothing is
# gained by taking others with it.
_BYTES = 1 << 24


class DueLayer(Protocol):
    """What is due to be compressed: the stream of a layer, or full pages of an engine."""

    @property
    def compressor(self) -> Compressor | None:
        """What compresses it."""

    def newest(self) -> tuple[Newest, Callable[[Page], None]] | None:
        """What becomes of the newest tokens now that a compression is due while it decodes, and
        what takes the next page. None: more than these must be compressed (``compress_due``)."""

    def compress_due(self) -> None:
        """Compress all slots while it decodes."""


@torch.no_grad()
def compress_together(due: Sequence[DueLayer]) -> None:
    """Compress layers that are due while they decode. Those whose pages are alike share all
    operations, which take most of the time where layers are small."""
    groups: dict[Hashable, list[tuple[DueLayer, Newest, Callable[[Page], None]]]] = {}
    for one in due:
        found = one.newest()
        if found is None:
            one.compress_due()
        else:
            groups.setdefault(found[0].kind, []).append((one, *found))
    for alike in groups.values():
        newest = alike[0][1]
        most = max(1, at_once(newest.page.exact.fields["keys"], _BYTES) // newest.nbytes)
        for start in range(0, len(alike), most):
            group = alike[start : start + most]
            method = group[0][0].compressor
            assert method is not None
            pages = compress_newest(method, [newest for _, newest, _ in group])
            for page, (one, _, turn_to) in zip(pages, group, strict=True):
                if page is None:
                    one.compress_due()
                else:
                    turn_to(page)
