"""Sinks and recent window around a streaming sketch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.base import check_input
from kvsketch.methods.sketches.base import Sketch, token_bytes
from kvsketch.methods.window import check_window, split
from kvsketch.observed import Observed
from kvsketch.slots import Slots
from kvsketch.state import FLOATS, Reader, State, name_of


class WindowedSketch:
    """A sketch with its window, in the place of a ``Compressor``: the first ``sink`` and the last
    ``recent`` live tokens stay unchanged, and all tokens between them are added to a sketch,
    permanently.

    A budget bounds the bytes of the exact tokens and of the whole state of the sketch. The sketch
    gets as many slots as fit into the bytes that the exact tokens leave. If the budget grows (as a
    share of the tokens seen), the window and the sketch grow, too. The number of tokens that a
    sketch counts as (``worth``) depends on its size and not on its contents, so that other rows of
    a batch do not affect when a cache compresses.

    Args:
        build: makes the sketch for a number of slots, at the first compression.
        sink: tokens kept from the start, >= 0.
        recent: tokens kept from the end, >= 0.
        least: the smallest number of slots for which the sketch is built.

    Raises:
        InputError: sink or recent negative or not an int.
    """

    requires = Sketch.requires
    window: int | None = None
    recompresses = Sketch.recompresses

    def __init__(
        self, build: Callable[[int], Sketch], sink: int = 4, recent: int = 32, least: int = 1
    ) -> None:
        check_window(sink, recent)
        self.build, self.sink, self.recent, self.least = build, sink, recent, least
        self.around = sink, recent
        self.reset()

    def reset(self) -> None:
        """Discard the sketch."""
        self.sketch: Sketch | None = None
        self.worth = 0  # the sketch takes at most the bytes of so many tokens
        self._rows: Tensor | None = None
        self._sinks = self._window = 0  # sink and recent as far as they fit into the budgets
        self._room = 0  # the number of tokens for which the sketch was sized
        self._dtype: torch.dtype | None = None  # of the tokens' values
        self._before = 0  # slots before the recent window, as returned by ``__call__``

    def fresh(self) -> WindowedSketch:
        """Another, empty window with the same options, for heads with a different budget."""
        return WindowedSketch(self.build, self.sink, self.recent, self.least)

    def take(self, exact: Slots, budget: int) -> tuple[Slots, Slots] | None:
        """Add the exact tokens between sinks and recent window to the sketch.

        Args:
            exact: all exact tokens in the cache, in order. At the first call all tokens.
            budget: the number of tokens whose bytes exact tokens and sketch may take together.

        Returns:
            The exact tokens before and after the sketch. None if the budget is too small for the
            smallest sketch, so that nothing can be compressed.

        Raises:
            InputError: non-finite keys or values, or options with which the sketch is too large.
        """
        check_input(exact, budget)
        if self.sketch is None:
            least = _worth(self.build(self.least), exact)
            if budget < least:
                return None
            self._sinks = min(self.sink, budget - least)
        else:
            least = self.worth
        self._window = max(self._window, min(self.recent, budget - least - self._sinks))
        self._fit(exact, budget - self._sinks - self._window)
        assert self.sketch is not None
        rest = exact.narrow(self._sinks, exact.count - self._sinks)
        if self.sketch.seen:
            first = exact.narrow(0, self._sinks)
            if rest.count <= self._window:
                return first, rest
            _, middle, last = split(rest, 0, self._window)
        else:
            first, middle, last = split(exact, self._sinks, min(self._window, rest.count))
        self.sketch.extend(replace(middle, score=None))
        return first, last

    def observe(self, slots: Slots, observed: Observed) -> Slots:
        """Return ``slots`` unchanged, because a sketch does not use queries."""
        return slots

    def echo(self, slots: Slots, asked: Observed, sample: Tensor | None, alone: bool) -> Slots:
        """Return ``slots`` unchanged, likewise."""
        return slots

    def weights_of(self, observed: Observed) -> None:
        """None: a sketch has no scores."""

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        """As ``observe``."""
        return slots

    def complete(self, slots: Slots, sample: Tensor, echo: Tensor | None) -> Slots:
        """As ``observe``."""
        return slots

    def importance(self, slots: Slots) -> Tensor | None:
        """None: a sketch has no scores."""
        return None

    def __call__(
        self, slots: Slots, budget: int, observed: Observed | None = None, *, scored: bool = False
    ) -> Slots:
        """As ``Compressor.compress``: returns the slots over which attention is computed. The next
        call must receive these slots again, followed by the new tokens."""
        check_input(slots, budget)
        if self.sketch is None:
            exact = slots
            if slots.count <= budget:
                return slots
        else:
            last = slots.narrow(self._before, slots.count - self._before)
            exact = Slots.cat([slots.narrow(0, self._sinks), last])
            # Sums of a sketch may be float32, and then all slots are. Tokens keep their values.
            exact = replace(exact, values=exact.values.to(self._dtype))
        self._dtype = exact.values.dtype
        parts = self.take(exact, budget)
        if parts is None:
            return slots
        assert self.sketch is not None
        middle = self.sketch.slots
        self._before = parts[0].count + middle.count
        return Slots.cat([parts[0], middle, parts[1]])

    def _fit(self, token: Slots, room: int) -> None:
        """Make the sketch, or enlarge it, as much as fits into the bytes of ``room`` tokens."""
        if self.sketch is not None and (room <= self._room or not self.sketch.grows):
            return
        low, high = self.least, max(self.least, room)
        while low < high:
            middle = (low + high + 1) // 2
            if _worth(self.build(middle), token) <= room:
                low = middle
            else:
                high = middle - 1
        fitting = self.build(low)
        if self.sketch is None:
            self.sketch = fitting
            if self._rows is not None:
                self.sketch.number_rows(self._rows)
        else:
            self.sketch.widen(fitting)
        self._room, self.worth = room, _worth(self.sketch, token)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to the batch axis of the sketch's state. Rows are renumbered."""
        self._rows = None
        if self.sketch is not None:
            self.sketch.map_batch(fn)

    def number_rows(self, rows: Tensor) -> None:
        """Set the numbers of these rows in a larger batch, see ``Sketch.number_rows``."""
        self._rows = rows
        if self.sketch is not None:
            self.sketch.number_rows(rows)

    def to_state(self) -> State:
        """The state of the sketch, and the number of tokens for which it was sized."""
        names = {"worth": self.worth, "sinks": self._sinks, "window": self._window}
        state = State(values={**names, "room": self._room, "before": self._before})
        state.values["dtype"] = None if self._dtype is None else name_of(self._dtype)
        state.keep(rows=self._rows)
        state.put("sketch", None if self.sketch is None else self.sketch.to_state())
        return state

    def restore(self, reader: Reader, token: Slots) -> None:
        """Restore the result of ``to_state`` in an empty window.

        Args:
            token: example tokens, which define shapes and dtypes. Their number does not matter.

        Raises:
            InputError: inconsistent tensors or numbers.
        """
        self._sinks = reader.whole("sinks", 0, self.sink)
        self._window = reader.whole("window", 0, self.recent)
        self.worth, self._room = reader.whole("worth"), reader.whole("room")
        self._before = reader.whole("before")
        dtype = reader.anything("dtype")
        if dtype is not None and dtype not in FLOATS:
            raise reader.wrong("dtype", dtype, f"null or one of {', '.join(FLOATS)}")
        self._dtype = None if dtype is None else FLOATS[dtype]
        if reader.has("rows"):
            self._rows = reader.integers("rows", (token.keys.shape[0],), 0, 1 << 40)
        if reader.has("sketch"):
            kind = type(self.build(self.least))
            self.sketch = kind.from_state(reader.part("sketch"), token)
            if self.worth != _worth(self.sketch, token):
                raise reader.wrong("worth", self.worth, "what the sketch takes at most")
        reader.close()

    def tensors(self) -> list[Tensor]:
        """All tensors of the sketch."""
        return [] if self.sketch is None else self.sketch.tensors()


def _worth(sketch: Sketch, token: Slots) -> int:
    """The largest size of a sketch in bytes, as a number of tokens, rounded up.

    Raises:
        InputError: with these options, the size depends on the stream.
    """
    most = sketch.most_bytes(token)
    if most is None:
        raise InputError(
            f"method={sketch.name!r}: its options leave its size to the stream, and a budget needs "
            "a bound"
        )
    return -(-most // token_bytes(token))
