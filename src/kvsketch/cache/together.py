"""Compression of several layers after the same decoded token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from kvsketch.cache.compress import Newest, compress_newest
from kvsketch.cache.stream import Stream
from kvsketch.page.page import Page
from kvsketch.pieces import at_once

# Slots of more bytes are not copied at once. A layer that has more takes so long that nothing is
# gained by taking others with it.
_BYTES = 1 << 24


@torch.no_grad()
def compress_together(streams: Sequence[Stream]) -> None:
    """Compress layers that are due while they decode. Those whose pages are alike share all
    operations, which take most of the time where layers are small."""
    groups: dict[Hashable, list[tuple[Stream, Newest, Callable[[Page], None]]]] = {}
    for stream in streams:
        found = stream.newest()
        if found is None:
            stream.compress_due()
        else:
            groups.setdefault(found[0].kind, []).append((stream, *found))
    for alike in groups.values():
        newest = alike[0][1]
        most = max(1, at_once(newest.page.exact.fields["keys"], _BYTES) // newest.nbytes)
        for start in range(0, len(alike), most):
            group = alike[start : start + most]
            method = group[0][0].compressor
            assert method is not None
            pages = compress_newest(method, [newest for _, newest, _ in group])
            for page, (stream, _, turn_to) in zip(pages, group, strict=True):
                if page is None:
                    stream.compress_due()
                else:
                    turn_to(page)
