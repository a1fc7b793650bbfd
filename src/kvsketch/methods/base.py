"""What a compressor is: (Slots, budget, observed queries?) -> Slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .. import random_numbers
from ..errors import InputError
from ..slots import Observed, Slots


class Compressor(ABC):
    """Base class of all methods. A new method overrides ``compress`` (and ``observe``, if it
    looks at queries) and is registered in ``methods/__init__.py``.

    Input may be weighted (the output of an earlier compression) and may hold dead slots; the
    order of the slots is the order of the tokens, and the output keeps it.

    What a row of the batch keeps depends on its own slots and queries, its number in the batch, the
    seed and the calls before: neither on what other rows hold nor on how many there are, but for
    the rounding of products that are computed together.

    Args:
        seed: seeds the object's own ``torch.Generator``; the same seed gives the same bytes.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    needs_queries: ClassVar[bool] = False
    #: ``score`` is the attention received so far, so a decode kernel may add to it directly instead
    #: of handing over queries.
    accumulates: ClassVar[bool] = False

    #: how ``SketchCache`` spends a budget unless told: "even", or "measured" where it lowers errors
    allocation: ClassVar[str] = "even"

    #: how many of a prompt's last queries it looks at; None: all of them
    window: int | None = None

    #: the numbers of its rows, int64 ``[batch]``, if they are part of a larger batch; None: 0, 1, 2
    #: and so on. Rows of different numbers choose independently of each other.
    rows: Tensor | None = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        # On the CPU whatever the device of the keys, so that a seed means the same everywhere.
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, slots: Slots, budget: int, observed: Observed | None = None) -> Slots:
        """Reduce ``slots`` to at most ``budget`` per KV head.

        Args:
            slots: ``[batch, num_key_value_heads, n, ...]``; returned unchanged if n <= budget.
            budget: slots per KV head, >= 1.
            observed: queries of the newest tokens; required when ``needs_queries``.

        Raises:
            InputError: budget < 1, non-finite keys or values, or queries missing.
        """
        check_input(slots, budget)
        if slots.count <= budget:
            return slots
        return self.compress(self.observe(slots, observed), budget)

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        """Fold observed queries into ``slots.score``. Sees all slots, sinks and recent included."""
        return slots

    def reset(self) -> None:  # noqa: B027 - most methods hold nothing
        """Forget what is held between ``observe`` and ``compress``."""

    def tensors(self) -> list[Tensor]:
        """What is held between ``observe`` and ``compress``, for byte counting."""
        return []

    @abstractmethod
    def compress(self, slots: Slots, budget: int) -> Slots:
        """Reduce to exactly ``budget`` slots (0 <= budget < n); may use ``slots.score``."""

    def streams(self, batch: int, heads: int, device: torch.device) -> Tensor:
        """A fresh random stream for every row and head: keys, int64 ``[batch, heads]``. Takes one
        number of the object's generator, so call it as often whatever the rows hold."""
        rows = torch.arange(batch) if self.rows is None else self.rows
        number = random_numbers.drawn(self.generator)
        return random_numbers.streams(number, rows.to(device), heads)

    def random(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform float64 numbers in [0, 1) of a shape ``[batch, heads, ...]``, from fresh
        ``streams``: a row's do not depend on how many other rows there are."""
        return random_numbers.uniform(self.streams(shape[0], shape[1], device), *shape[2:])

    def __deepcopy__(self, memo: dict[int, object]) -> Compressor:
        """Copies continue the random stream from the same state (torch.Generator itself cannot be
        deep-copied)."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin.generator = self.generator.clone_state()
        return twin


def check_input(slots: Slots, budget: int) -> None:
    """Refuse an impossible budget or non-finite input before anything changes."""
    if budget < 1:
        raise InputError(f"budget={budget} must be at least 1 slot per KV head")
    for name, tensor in (("keys", slots.keys), ("values", slots.values)):
        if not all_finite(tensor):
            raise InputError(f"{name} are not finite (NaN or infinity)")


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. One sum settles it almost always, an order of
    magnitude faster than a look at every element."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def keep_top(slots: Slots, score: Tensor, budget: int) -> Slots:
    """Keep the ``budget`` live slots of highest score per head, in their old order.

    Args:
        score: float ``[batch, heads, n]``.
    """
    live = slots.live()
    if live is not None:
        score = score.masked_fill(~live, -torch.inf)
    index = score.topk(budget, dim=-1).indices.sort(dim=-1).values
    return slots.take(index)
