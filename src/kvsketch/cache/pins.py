"""Spans of tokens that are never compressed."""

from __future__ import annotations

import torch

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.slots import Slots
from kvsketch.state import Reader


class Pins:
    """The pinned tokens of a layer. At the compression that would reach them they are moved behind
    the sinks, and stay as they are from then on: a slot is the same wherever it is in a page, since
    its key encodes the position.

    Args:
        sink, recent: first and last tokens that stay as they are in any case; ``Pace.store`` may
            change the latter.

    Attributes:
        spans: first and end of every span, in order, counted from the first token.
        tail: the first token that is still one of the last slots, in order; those before it are
            sinks, pinned, or compressed.
    """

    def __init__(self, sink: int, recent: int) -> None:
        self.sink, self.recent = sink, recent
        self.spans: list[tuple[int, int]] = []
        self.tail = 0

    def __bool__(self) -> bool:
        return bool(self.spans)

    def add(self, start: int, end: int) -> None:
        """Pin the tokens from ``start`` to ``end``, which may be read later.

        Raises:
            InputError: an empty span, or one that overlaps another.
            UnsupportedError: some of its tokens are compressed already.
        """
        named = f"pin({start!r}, {end!r})"
        if not all(type(x) is int for x in (start, end)) or not 0 <= start < end:
            raise InputError(f"{named}: the span must be two ints with 0 <= start < end")
        for first, last in self.spans:
            if start < last and first < end:
                raise InputError(f"{named} overlaps the pinned span ({first}, {last})")
        if max(start, self.sink) < min(end, self.tail):
            raise UnsupportedError(
                f"{named}: tokens before {self.tail} are compressed already: pin them before they "
                "are read"
            )
        self.spans = sorted([*self.spans, (start, end)])

    def count(self, seen: int, recent: int) -> int:
        """How many tokens of a row a compression after ``seen`` tokens keeps because they are
        pinned, besides sinks and the last ``recent`` ones."""
        return self._within(self.sink, max(self.tail, seen - recent))

    def passed(self, seen: int, recent: int) -> None:
        """A compression after ``seen`` tokens kept the last ``recent`` of them in every head."""
        self.tail = max(self.tail, seen - recent)

    @property
    def tokens(self) -> int:
        """All pinned tokens that are no sinks."""
        return sum(max(0, end - max(start, self.sink)) for start, end in self.spans)

    def gathered(self, slots: Slots, seen: int) -> Slots:
        """Slots with the pinned tokens that the compression after ``seen`` tokens reaches behind
        the sinks and those before.

        Args:
            slots: ``[batch, num_key_value_heads, n, ...]``, of which the last ones are the tokens
                from ``tail`` on.
        """
        new = self._new(seen)
        before = self.sink + self._within(self.sink, self.tail)
        if not new:
            return slots
        live = slots.live()
        device = slots.keys.device
        if live is None:
            live = torch.ones(slots.keys.shape[:3], dtype=torch.bool, device=device)
        order = (live.cumsum(-1) > before).to(torch.uint8)  # dead slots are first, and stay there
        columns = slots.count - seen + torch.tensor(new, device=device)
        order[..., columns] = 0
        return slots.take(order.argsort(dim=-1, stable=True))

    def _new(self, seen: int) -> list[int]:
        """The pinned tokens that the compression after ``seen`` tokens is the first to reach."""
        reach = seen - self.recent
        return [
            t
            for start, end in self.spans
            for t in range(max(start, self.sink, self.tail), min(end, reach))
        ]

    def _within(self, first: int, last: int) -> int:
        return sum(max(0, min(end, last) - max(start, first)) for start, end in self.spans)

    def values(self) -> list[int]:
        """JSON values."""
        return [self.tail, *(x for span in self.spans for x in span)]

    def restore(self, reader: Reader) -> None:
        """Take in what ``values`` said.

        Raises:
            InputError: no spans in order.
        """
        found = reader.anything("pins")
        plain = isinstance(found, list) and all(type(x) is int and 0 <= x < 1 << 40 for x in found)
        if not plain or len(found) % 2 == 0:
            raise reader.wrong("pins", found, "a number and pairs of numbers")
        for start, end in zip(found[1::2], found[2::2], strict=True):
            self.add(start, end)
        self.tail = found[0]

    def clear(self) -> None:
        """Forget all spans."""
        self.spans, self.tail = [], 0
