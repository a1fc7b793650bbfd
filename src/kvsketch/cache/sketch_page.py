"""A page around a sketch: exact tokens before and behind it, nothing held twice."""

from __future__ import annotations

from torch import Tensor

from ..methods.sketches.base import Sketch
from ..slots import Slots
from .page import TransientPage, _padded


class SketchPage(TransientPage):
    """Sinks, a sketch, then recent and appended tokens.

    The sketch is held, and mapped, by whoever compresses; here is only a reference to it.

    Args:
        first: exact tokens before what the sketch took in.
        sketch: what took in the tokens between.
        worth: how many slots the sketch counts as: the tokens that its bytes would hold.
        last: exact tokens behind.
        capacity: slots per KV head, with ``worth``.
    """

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

    def tensors(self) -> list[Tensor]:
        """Every tensor held but the sketch's, for byte counting."""
        held = super().tensors()
        return held if self._view is None else [*held, *self._view.tensors().values()]

    def _place(self, name: str, slot: int) -> int:
        return slot - self._worth
