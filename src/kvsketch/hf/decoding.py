"""Decoded tokens until a compression is due: each layer appends, attends and keeps the query."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvsketch.attention import attend_to
from kvsketch.hf import interface
from kvsketch.hf.attention import OF_THE_FORWARD
from kvsketch.hf.forward import Forward
from kvsketch.hf.interface import Kernel
from kvsketch.hf.layer import SketchLayer
from kvsketch.kernels import paged
from kvsketch.observed import Observed
from kvsketch.page.part import Part
from kvsketch.slots import Slots

# Fewer tokens than this are not worth the preparation.
_LEAST = 4
# Arguments of a model's attention that do not matter to a single token over slots, and those that
# do not if they are 0 or False.
_OFF = {"dropout", "output_attentions"}
_ANY = OF_THE_FORWARD - _OFF | {"is_causal"}


@dataclass
class _Turn:
    """What one layer needs for a token.

    Attributes:
        page: that it must still hold; parts: those of the page.
        appended: tokens appended to the last part before the first token of the run.
        keeps: whether the queries are kept for scores.
        kernel: its attention, prepared at the first token, as is ``most``.
        most: so many queries that are kept become scores.
    """

    layer: SketchLayer
    page: object
    parts: Sequence[Part]
    appended: int
    keeps: bool
    kernel: paged.PreparedAttention | None = None
    most: int = 0


class Decoding:
    """A run of decoded tokens at which no layer has to do more than append, attend and keep the
    query: nothing is scored, allocated, masked or read again, and nothing compressed before the
    last of them. For such a run everything that does not change is looked up once. ``Forward``
    runs all other tokens, and takes over in the middle of one whose arguments are not those of a
    plain token.

    Attributes:
        left: tokens that are left of the run.
    """

    def __init__(self, forward: Forward, turns: Sequence[_Turn], left: int) -> None:
        self._forward, self._turns, self.left = forward, turns, left
        self._at = 0  # the layer whose turn it is
        self._thread = 0  # that runs the forward
        self._done = 0  # tokens
        self._taken: tuple[Tensor, Tensor] | None = None  # keys and values of that layer

    @classmethod
    def of(cls, forward: Forward) -> Decoding | None:
        """The run that begins with the next token; None: it would be short."""
        if forward.reading is not None or forward.masks.live is not None:
            return None
        if len(forward.sketches) < len(forward.layers) or not forward.over:
            return None
        turns, left = [], 1 << 30
        for layer in forward.sketches:
            stream, page = layer.stream, layer.stream.held_page
            if page is None or stream.seen != forward.tokens:
                return None
            if (left := min(left, stream.pace.undue(page))) < _LEAST:
                return None
            if layer.record_past or layer.settings.track_positions:
                return None
            parts = page.open()
            assert not isinstance(parts, Slots)
            keeps = stream.method.requires.queries
            turns.append(_Turn(layer, page, parts, parts[-1].appended, keeps))
        return cls(forward, turns, left)

    def takes(self, key: Tensor) -> bool:
        """Whether a forward that begins with this key is one of the run: no other method of the
        cache was called in between."""
        first = self._turns[0].layer
        if not self.left or key.shape != first.token_shape:
            return False
        if key.dtype != first.dtype or key.requires_grad:
            return False
        for turn in self._turns:
            layer, appended = turn.layer, turn.appended + self._done
            if layer.stream.held_page is not turn.page or turn.parts[-1].appended != appended:
                return False
            if layer.record_past or layer.module is None:
                return False
        return self._forward.reading is None and self._forward.masks.live is None

    def take(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Append a layer's keys and values; None: the rest of this forward is for ``Forward``."""
        if not self.left:
            return None
        thread, turn = threading.get_ident(), self._turns[self._at]
        if index == 0:
            self._thread = thread
        fits = keys.shape == turn.layer.token_shape and keys.dtype == turn.layer.dtype
        if index != self._at or thread != self._thread or self._taken is not None or not fits:
            self.leave()
            self.left = 0
            return None
        turn.parts[-1].put(keys, values)
        turn.layer.stream.seen += 1
        self._taken = keys, values
        interface.updated(turn.layer, self, shared=False)
        return keys, values

    def attend(
        self,
        layer: SketchLayer,
        kernel: Kernel,
        name: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What a model's attention module calls instead of ``kernel``, see ``hf.attention``."""
        taken, turn = self._taken, self._turns[self._at]
        plain = (
            attention_mask is None
            and not args
            and not module.training
            and not query.requires_grad
            and query.shape == layer.query_shape
            and taken is not None
            and key is taken[0]
            and value is taken[1]
            and layer.module is not None
            and layer.module() is module
            and all(x is None or n in _ANY or (n in _OFF and not x) for n, x in kwargs.items())
        )
        if not plain:
            self.leave()
            given = {"softcap": softcap, "s_aux": s_aux, **kwargs}
            given = {n: x for n, x in given.items() if x is not None}
            args = (module, query, key, value, attention_mask, *args)
            return self._forward.attend(layer, kernel, name, *args, scaling=scaling, **given)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        asked = Observed(query, scale, softcap, sinks=s_aux)
        stream = layer.stream
        if turn.kernel is None:
            turn.kernel = paged.prepared(asked, turn.parts, stream.padded)
            turn.most = stream.scores.queries.most(stream.scores.row_bytes, query)
        out = turn.kernel.attend(asked)
        if out is None:
            out = attend_to(asked, turn.parts, None, stream.padded)
        if turn.keeps:
            queries = stream.scores.queries
            queries.add(asked)
            if queries.count >= turn.most:
                stream.scores.fold(stream.page)
        self._taken = None
        self._at += 1
        if self._at == len(self._turns):
            self._at, self._done, self.left = 0, self._done + 1, self.left - 1
            if not self.left:
                self._forward.compress_due([turn.layer.stream for turn in self._turns])
        batch, heads, _, dim = out.shape
        return out.view(batch, 1, heads, dim), None

    def leave(self) -> None:
        """Leave the rest of a forward that has begun to ``Forward``, also of one that was
        interrupted."""
        if not self._at and self._taken is None:
            return
        layers = [turn.layer for turn in self._turns[: self._at]]
        open_one = None if self._taken is None else self._turns[self._at].layer
        taken, self._taken, self._at, self.left = self._taken, None, 0, 0
        self._forward.take_over(layers, open_one, taken)
