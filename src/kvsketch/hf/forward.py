"""The forward that runs through a cache: its open layers, its masks, and its failure."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvsketch.cache.plan import Plan
from kvsketch.cache.stream import Stream
from kvsketch.errors import AccuracyWarning, UnsupportedError
from kvsketch.hf import accounting, interface
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.masks import Masks
from kvsketch.observed import Observed

#: a measured error, on average over layers and heads, of which a cache warns
LARGE_ERROR = 0.5


@dataclass(frozen=True)
class Again:
    """A part of a second reading.

    Attributes:
        about: the tokens that are read again, in order: a slice, or int64 indices.
        kept: number of queries to keep.
        local: attend only to these tokens, the first four and the part itself.
        unmasked: there is no padding and the kernel is torch's, so the model need not create a mask
            over the tokens of the first reading.
        stops: a forward may stop after the last layer's queries (``second_reading.ReadEnough``).
    """

    about: slice | Tensor
    kept: int = 0
    local: bool = False
    unmasked: bool = False
    stops: bool = False


@dataclass
class Reading:
    """A context that ``prefill`` reads before it is compressed.

    Attributes:
        first_counts: whether the queries of the first reading count.
        again: the part that is read a second time now; None: this is the first reading.
        weights: weights of the queries of an attention module, ``[batch, q]``; None: all equal.
        later: queries whose weights are not known yet, with their layers; None: they are known.
    """

    first_counts: bool
    again: Again | None = None
    weights: Mapping[nn.Module, Tensor] | None = None
    later: list[tuple[SketchLayer, Observed]] | None = None

    def ask(self, layer: SketchLayer, observed: Observed) -> None:
        """The queries of a layer in a second reading."""
        if self.later is not None:
            self.later.append((layer, observed))
            return
        if self.weights is not None:
            module = None if layer.module is None else layer.module()
            assert module is not None
            weights = self.weights[module].to(observed.queries.device)
            observed = replace(observed, weights=weights)
        assert self.again is not None
        layer.stream.ask(observed, self.again.about, self.again.kept)


class Forward:
    """State shared by the layers of one cache. A forward begins with the first update of a layer
    and ends when every attention layer was updated and the attention of every compressed one was
    computed.

    Attributes:
        layers: the cache's own list of layers.
        plan: how the budget is divided.
        masks: the masks of this stream.
        peak_nbytes: the peak bytes of the cache.
        reading: the context that ``prefill`` is reading; None: none.
    """

    def __init__(self, config: Any, plan: Plan, needs_reread: bool = False) -> None:
        self.needs_reread = needs_reread  # whether the method scores by a second reading
        self._config = config
        self.plan = plan
        self.layers: list[Any] = []
        self._counted: list[int] = []  # layers that count tokens, by index
        self.masks = Masks()
        self.peak_nbytes = 0
        self._updated: set[int] = set()  # layers of this forward, by index
        self._open: list[SketchLayer] = []  # updated, not yet attended to
        self._thread: int | None = None
        self._before = 0  # tokens before this forward
        self._torn = False  # some layers have tokens that others lack
        self.reading: Reading | None = None
        self.measured = False  # whether a prompt was compressed, so that there are new errors

    def watch(self, layers: list[Any]) -> None:
        """Set the cache's layers."""
        self.layers = layers
        self._counted = [i for i, x in enumerate(layers) if isinstance(x, CacheLayerMixin)]

    @property
    def first(self) -> SketchLayer:
        """The first layer that can be compressed."""
        return self.sketches[0]

    @property
    def sketches(self) -> list[SketchLayer]:
        return [layer for layer in self.layers if isinstance(layer, SketchLayer)]

    def ready(self, stream: Stream, prefill: bool) -> bool:
        """Whether the plan gives a budget to a waiting stream once its tokens settle."""
        return stream.waits and self.plan.ready(stream, prefill)

    def plan_for(self, layer: SketchLayer, prefill: bool, hold: bool) -> bool:
        """Let the plan give budgets that follow from the prompt of a layer whose stream waits.
        Returns whether any layer was compressed."""
        streams = [sketch.stream for sketch in self.sketches]
        return self.plan.hand_down(layer.stream, streams, prefill, hold)

    def begin(self, index: int) -> None:
        """Layer ``index`` is about to be updated.

        Raises:
            UnsupportedError: an earlier forward stopped in the middle, another one is running, or
                the attention of the previous layer was not ours. Nothing is changed.
        """
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise UnsupportedError(
                "another thread is in the middle of a forward with this SketchCache, or stopped "
                "there: one cache serves one forward at a time (copy.deepcopy makes another); "
                "after an exception call reset()"
            )
        if self._thread is None or index in self._updated:
            self._start(thread)
            if self.needs_reread and self._before == 0 and self.reading is None:
                self._thread = None
                raise UnsupportedError(
                    "this method scores a context by a second reading: read it with "
                    "kvsketch.prefill(model, input_ids, cache, queries='reread', tokenizer=...)"
                )
        unread = (
            [layer for layer in self._open if layer.settings.readers == 1] if self._open else []
        )
        if unread:
            self.undo()
            raise UnsupportedError(
                f"layer {self.layers.index(unread[0])} took keys and values, but its attention did "
                "not use transformers' attention interface, so its cache cannot "
                "be compressed; use DynamicCache for this model"
            )

    def _start(self, thread: int) -> None:
        lengths = {self.layers[index].get_seq_length() for index in self._counted}
        if self._torn or self._open or len(lengths) > 1:
            raise UnsupportedError(
                "a forward stopped in the middle (an exception?), or the model has fewer layers "
                "than the configuration that this SketchCache was made from, so that its layers "
                "hold different tokens: call reset() and read the context again"
            )
        self._before = lengths.pop() if lengths else 0
        self._updated.clear()
        self._thread = thread

    def updated(self, index: int) -> None:
        """Layer ``index`` has new tokens."""
        self._updated.add(index)
        layer = self.layers[index]
        if isinstance(layer, SketchLayer):
            self._open.append(layer)
        else:
            self._end()

    def attended(self, layer: SketchLayer) -> None:
        """All readers of the new keys of ``layer`` have attended to them."""
        if layer in self._open:
            self._open.remove(layer)
        self._end()

    def is_last(self, layer: SketchLayer) -> bool:
        """Whether the forward ends with the attention of ``layer``."""
        return self._open == [layer] and len(self._updated) == len(self._counted)

    @property
    def over(self) -> bool:
        """Whether every layer has attended to the newest tokens."""
        return self._thread is None

    def _end(self) -> None:
        if not self._open and len(self._updated) == len(self._counted):
            self._thread = None
            self.masks.forget()
            if self.measured:
                self.warn_of_error()

    def warn_of_error(self) -> None:
        """Warn if the error that was measured when a prompt was compressed is large."""
        self.measured = False
        mean = accounting.mean_error(self.layers)
        if mean is not None and mean > LARGE_ERROR:
            warnings.warn(
                f"the measured error of this compression is {mean:.0%} of the attention output on "
                f"average over layers and KV heads: answers will be unreliable; keep more (budget, "
                "tolerance), or use another method",
                AccuracyWarning,
                stacklevel=2,
            )

    def undo(self) -> None:
        """Undo a failed forward in every layer. If this is not possible (compressed tokens, states
        that have advanced), the cache requires ``reset()``."""
        for index in self._updated:
            layer = self.layers[index]
            if isinstance(layer, SketchLayer):
                layer.undo()
            extra = layer.get_seq_length() - self._before
            if extra <= 0:
                continue
            if self._before == 0:
                self.reset_layer(index)
            elif _can_crop(layer):
                layer.crop(-extra)
            else:
                self._torn = True
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin) and index < max(
                self._updated, default=0
            ):
                if self._before == 0:
                    self.reset_layer(index)
                else:
                    self._torn = True
        self.masks.cut(self._before)
        self._close()

    def reset(self) -> None:
        """Forget everything."""
        self.plan.read_again(False)
        for index in range(len(self.layers)):
            self.reset_layer(index)
        self.masks.reset()
        self._torn = False
        self._close()

    def reset_layer(self, index: int) -> None:
        layer = self.layers[index]
        if isinstance(layer, SketchLayer):
            layer.reset()
        else:  # transformers 5.16 zeroes such a layer in place and keeps its length
            self.layers[index] = DynamicCache(config=self._config).layers[index]

    def _close(self) -> None:
        self._updated.clear()
        self._open.clear()
        self._thread = None
        interface.close()

    def check_crop(self, tokens: int) -> None:
        """Raise UnsupportedError unless every layer can remove its last ``tokens`` tokens."""
        for layer in self.layers if tokens else []:
            if isinstance(layer, SketchLayer):
                layer.check_crop(tokens)
            if not _can_crop(layer):
                raise UnsupportedError(
                    f"crop({-tokens}): a {type(layer).__name__} cannot remove its last tokens; "
                    "call activate_past_recording() before the tokens that may have to be "
                    "removed, or use DynamicCache"
                )

    def nbytes(self) -> int:
        """Bytes of all tensors now."""
        own = 0 if self.masks.live is None else self.masks.live.nbytes
        return own + sum(accounting.layer_nbytes(layer) for layer in self.layers)

    def note_bytes(self) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None}


def _can_crop(layer: Any) -> bool:
    if isinstance(layer, DynamicSlidingWindowLayer):
        return bool(layer.record_past or layer.get_seq_length() < layer.sliding_window)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recurrent = any(layer.is_recurrent_states_initialized.values())
        return bool(layer.record_past) and not recurrent
    return not isinstance(layer, SketchLayer) or not layer.stream.compressed or layer.record_past
