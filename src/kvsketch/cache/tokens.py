"""A layer's tokens before the first compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.fields import read_fields
from kvsketch.cache.kind import Kind
from kvsketch.errors import InputError
from kvsketch.slots import Slots
from kvsketch.state import Reader, State


class Tokens:
    """All tokens of a layer, in order and unchanged. The methods are those of ``Page``; there is
    always room, because a token is appended to a copy, as in transformers' own cache.

    Attributes:
        live: bool ``[batch, tokens]``, False for padding; None: there is none so far.
    """

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self.live: Tensor | None = None

    @property
    def slots(self) -> Slots:
        """The tokens, padding included.

        Raises:
            InputError: there is none yet.
        """
        if self._slots is None:
            raise InputError("the stream is empty: extend() it first")
        return self._slots

    @property
    def visible(self) -> Slots:
        """The tokens, padding as dead slots."""
        return self.slots if self.live is None else self.slots.only(self.live[:, None, :])

    @property
    def held(self) -> Tensor:
        """Tokens of every row and head, int64 ``[batch, num_key_value_heads]``."""
        batch, heads, n = self.slots.keys.shape[:3]
        return torch.full((batch, heads), n)

    def append(self, new: Slots) -> None:
        """Add ``new`` ``[batch, num_key_value_heads, q, ...]`` at the end."""
        self._slots = new if self._slots is None else Slots.cat([self._slots, new])
        if self.live is not None:
            tail = self.live.new_ones(self.live.shape[0], new.count)
            self.live = torch.cat([self.live, tail], dim=1)

    def mark_last(self, live: Tensor) -> None:
        """Mark which of the last tokens are real: bool ``[batch, q]``."""
        if self.live is None:
            self.live = live.new_ones(live.shape[0], self.slots.count)
        self.live[:, self.slots.count - live.shape[1] :] = live

    def drop(self, tokens: int) -> None:
        """Remove the last tokens."""
        if self._slots is None:
            return
        kept = max(0, self._slots.count - tokens)
        self._slots = self._slots.narrow(0, kept)
        if self.live is not None:
            self.live = self.live[:, :kept]

    def set_score(self, score: Tensor) -> None:
        """Overwrite the score of all tokens, ``[batch, num_key_value_heads, tokens]``."""
        self._slots = replace(self.slots, score=score)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Tokens:
        """The tokens with ``fn`` (which acts on axis 0, the batch) applied to all tensors."""
        twin = Tokens()
        twin._slots = None if self._slots is None else self._slots.map(fn)
        twin.live = None if self.live is None else fn(self.live)
        return twin

    def to_state(self) -> State:
        """All tokens."""
        state = State(values={"count": self.slots.count})
        state.keep(live=self.live, **self.slots.tensors())
        return state

    @staticmethod
    def from_state(reader: Reader, kind: Kind) -> Tokens:
        """Restore the result of ``to_state``.

        Raises:
            InputError: inconsistent tensors.
        """
        count, tokens = reader.whole("count", 1), Tokens()
        tokens._slots = Slots(**read_fields(reader, (kind.batch, kind.heads, count), kind))
        if reader.has("live"):
            tokens.live = reader.tensor("live", (kind.batch, count), torch.bool)
        reader.close()
        return tokens

    def __deepcopy__(self, memo: dict[int, object]) -> Tokens:
        """Shares the tokens, which are never written to: appending creates new tensors."""
        twin = Tokens()
        twin._slots, twin.live = self._slots, None if self.live is None else self.live.clone()
        return twin

    def open(self) -> Slots:
        """What the newest tokens attend to."""
        return self.visible

    def release(self) -> None:
        """The attention over the tokens is done."""

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = [] if self._slots is None else list(self._slots.tensors().values())
        return held if self.live is None else [*held, self.live]
