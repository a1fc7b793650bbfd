"""Sink, recent window and compressed middle: a method with its window."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import InputError
from kvsketch.methods.base import Compressor
from kvsketch.methods.registry import Method, class_of
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.sketches import Sketch
from kvsketch.methods.window import check_window
from kvsketch.observed import Observed
from kvsketch.slots import Slots
from kvsketch.state import Reader, State


@dataclass(frozen=True)
class Windowed:
    """A compressor with its window: the first ``sink`` and the last ``recent`` live tokens stay
    unchanged, and the rest of the budget goes to what lies between (see ``Compressor.compress``).

    Raises:
        InputError: sink or recent negative or not an int.
    """

    compressor: Compressor
    sink: int = 4
    recent: int = 32

    #: whether slots that it has compressed can be compressed again, to any size
    recompresses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_window(self.sink, self.recent)

    @property
    def requires(self) -> Requirements:
        return self.compressor.requires

    def project(self, output: Tensor) -> None:
        """Pass the weight of the layer's output projection, ``[num_attention_heads, value_dim,
        hidden]``, to a method that requires it."""
        self.compressor.output = output

    @property
    def window(self) -> int | None:
        """The number of a prompt's last queries that the method uses; None: all of them."""
        return self.compressor.window

    def observe(self, slots: Slots, observed: Observed) -> Slots:
        """Update the scores of all slots by queries, see ``Compressor.observe``."""
        return self.compressor.observe(slots, observed)

    def fading(self, observed: Observed) -> tuple[Tensor, float] | None:
        """See ``Compressor.fading``."""
        return self.compressor.fading(observed)

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        """Update the scores by queries of a second reading, see ``Compressor.reread``."""
        return self.compressor.reread(slots, observed, about)

    def complete(self, slots: Slots, sample: Tensor) -> Slots:
        """Score the tokens that were not read again, see ``Compressor.complete``."""
        return self.compressor.complete(slots, sample)

    def importance(self, slots: Slots) -> Tensor | None:
        """The importance of slots, see ``Compressor.importance``."""
        return self.compressor.importance(slots)

    def __call__(
        self,
        slots: Slots,
        budget: int | Tensor,
        observed: Observed | None = None,
        *,
        scored: bool = False,
        fit: bool = True,
    ) -> Slots:
        """At most ``budget`` slots per KV head, see ``Compressor.compress``."""
        return self.compressor.compress(
            slots, budget, observed, sink=self.sink, recent=self.recent, scored=scored, fit=fit
        )

    def fresh(self) -> Windowed:
        """A copy that goes on from the same random numbers."""
        return copy.deepcopy(self)

    def own_state(self) -> State | None:
        """The state between calls that is not part of a page."""
        return self.compressor.to_state()

    def restore_own(self, reader: Reader, batch: int, heads: int) -> None:
        """Restore the result of ``own_state``."""
        self.compressor.restore(reader.part("method"), batch, heads)

    def reset(self) -> None:
        """Reset the compressor's state."""
        self.compressor.reset()

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, to the compressor's state."""
        self.compressor.map_batch(fn)

    def number_rows(self, rows: Tensor) -> None:
        """Declare which rows of a larger batch these are (int64 ``[batch]``): from now on they keep
        what they would keep there."""
        self.compressor.rows = rows

    def restart(self, rows: Tensor) -> None:
        """Begin the random stream of the seed anew, for rows of these numbers (``number_rows``)."""
        self.compressor.generator.manual_seed(self.compressor.seed)
        self.compressor.rows = rows

    def tensors(self) -> list[Tensor]:
        """The compressor's state between calls."""
        return self.compressor.tensors()


def windowed(
    method: Method,
    sink: int = 4,
    recent: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Windowed | WindowedSketch:
    """A new method inside its sink and recent window.

    Args:
        method: a name in ``ALL_METHODS``, or a class or compressor of the caller's own. A
            compressor is copied; its copy's random stream starts from its seed plus ``seed``.
        options: further arguments of the method's constructor; not with a compressor, which has
            them already.

    Raises:
        InputError: unknown method, or an argument the method does not take or allow.
    """
    options = dict(options or {})
    cls = class_of(method)
    if isinstance(method, Compressor):
        if options:
            raise InputError(f"options={options!r}: give them to {cls.__name__} itself")
        twin = copy.deepcopy(method)
        twin.seed = method.seed + seed
        twin.generator = torch.Generator().manual_seed(twin.seed)
        return Windowed(twin, sink, recent)
    try:
        if issubclass(cls, Compressor):
            return Windowed(cls(seed=seed, **options), sink, recent)
        build: Callable[[int], Sketch] = functools.partial(cls.for_budget, seed=seed, **options)
        build(1024)  # wrong options should fail now, not at the first compression
        return WindowedSketch(build, sink, recent, _least(build, cls.least_slots))
    except TypeError as error:
        raise InputError(f"options={options!r} do not fit method={cls.name!r}: {error}") from None


def _least(build: Callable[[int], Sketch], slots: int) -> int:
    """The smallest number of slots that a sketch can be built for, which options may raise."""
    while True:
        try:
            build(slots)
        except InputError:
            slots += 1
        else:
            return slots
