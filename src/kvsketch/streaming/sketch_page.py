"""A page around a sketch: exact tokens before and behind it, nothing held twice."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor

from ..slots import Slots
from .base import Sketch
from .page import Page, _owned, _padded


class SketchPage(Page):
    """Sinks, a sketch, then recent and appended tokens.

    The sketch is held by whoever compresses; here is only a reference to it. ``slots`` are made
    from its state: between ``append`` and ``release`` (while one layer's attention runs) they are
    kept, and counted by ``tensors``; at any other time they are made for the caller alone.

    Args:
        first: exact tokens before what the sketch took in.
        sketch: what took in the tokens between.
        worth: how many slots the sketch counts as: the tokens that its bytes would hold.
        last: exact tokens behind.
        capacity: slots per KV head, with ``worth``.
    """

    transient = True

    def __init__(
        self, first: Slots, sketch: Sketch, worth: int, last: Slots, capacity: int
    ) -> None:
        exact = Slots.cat([first, last])
        self._first, self._worth, self._sketch = first.count, worth, sketch
        self.count, self.capacity = exact.count + worth, capacity
        self._buffers = {
            name: _padded(tensor, capacity - worth) for name, tensor in exact.tensors().items()
        }
        self._view = None
        self._open = False

    @property
    def exact(self) -> Slots:
        """The exact tokens, as views."""
        return Slots(
            **{n: b.narrow(2, 0, self._place(n, self.count)) for n, b in self._buffers.items()}
        )

    @property
    def slots(self) -> Slots:
        """Everything that attention sees, in the order of the tokens."""
        if self._view is not None:
            return self._view
        exact = self.exact
        last = exact.narrow(self._first, exact.count - self._first)
        slots = Slots.cat([exact.narrow(0, self._first), self._sketch.slots, last])
        self._view = slots if self._open else None
        return slots

    def append(self, new: Slots) -> None:
        """Write ``new`` behind the slots in use; it must fit into ``room``."""
        super().append(new)
        self._open = True

    def release(self) -> None:
        """The attention over ``slots`` is done: let the copy go."""
        self._view = None
        self._open = False

    def grown(self, capacity: int) -> SketchPage:
        """The same slots with room for more."""
        exact, places = self.exact, capacity - self._worth
        twin = copy.copy(self)
        twin.release()
        twin._buffers = {name: _padded(t, places) for name, t in exact.tensors().items()}
        twin.capacity = capacity
        return twin

    def map(self, fn: Callable[[Tensor], Tensor]) -> SketchPage:
        """The page with ``fn`` (which acts on axis 0, the batch) applied to the exact tokens; the
        sketch is for whoever holds it."""
        twin = copy.copy(self)
        twin.release()
        twin._buffers = {name: _owned(fn(tensor)) for name, tensor in self._buffers.items()}
        return twin

    def tensors(self) -> list[Tensor]:
        """Every tensor held but the sketch's, for byte counting."""
        held = super().tensors()
        return held if self._view is None else [*held, *self._view.tensors().values()]

    def _place(self, name: str, slot: int) -> int:
        return slot - self._worth
