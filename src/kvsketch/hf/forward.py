"""The forward that runs through a cache: its open layers, its masks, the plan, and its failure."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvsketch.cache.plan import Plan
from kvsketch.cache.stream import Stream
from kvsketch.cache.together import compress_together
from kvsketch.errors import AccuracyWarning, KVSketchError, UnsupportedError
from kvsketch.hf import accounting, interface
from kvsketch.hf.attention import LayerTurn, attention
from kvsketch.hf.interface import Kernel
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.masks import Masks
from kvsketch.hf.second_reading import ReadEnough, Reading
from kvsketch.observed import Observed

#: a measured error, on average over layers and heads, of which a cache warns
LARGE_ERROR = 0.35


class Forward:
    """What runs the layers of one cache. A forward begins with the first update of a layer and ends
    when every attention layer was updated and the attention of every compressed one was computed.
    It gives each layer its attention, takes what the layer has seen, and lets the plan give
    budgets, so that a layer need not know the others.

    Attributes:
        layers: the cache's own list of layers; sketches: those that can be compressed.
        plan: how the budget is divided.
        masks: the masks of this stream.
        peak_nbytes: the peak bytes of the cache.
        reading: the context that ``prefill`` is reading; None: none.
        inference: whether tensors may be those of ``torch.inference_mode``.
    """

    def __init__(self, config: Any, plan: Plan, needs_reread: bool = False) -> None:
        self.needs_reread = needs_reread  # whether the method scores by a second reading
        self._config = config
        self.plan = plan
        self.layers: list[Any] = []
        self.sketches: list[SketchLayer] = []
        self._counted: list[int] = []  # layers that count tokens, by index
        self.masks = Masks()
        self.peak_nbytes = 0
        self._updated: set[int] = set()  # layers of this forward, by index
        self._open: list[SketchLayer] = []  # updated, not yet attended to
        self._thread: int | None = None
        self._before = 0  # tokens before this forward
        self._torn = False  # some layers have tokens that others lack
        self._taking = False  # whether a layer is about to take new tokens
        self.inference = torch.is_inference_mode_enabled()
        self.reading: Reading | None = None
        self._renews = False  # whether the budget is divided anew at the end of this forward
        self._waits = False  # whether the part of this forward waits
        self._part: list[tuple[SketchLayer, Observed]] = []  # the newest, if it waits
        self._due: list[Stream] = []  # to be compressed at the end of this forward
        self.measured = False  # whether a prompt was compressed, so that there are new errors

    def watch(self, layers: list[Any]) -> None:
        """Set the cache's layers."""
        self.layers = layers
        self._counted = [i for i, x in enumerate(layers) if isinstance(x, CacheLayerMixin)]
        self.sketches = [layer for layer in layers if isinstance(layer, SketchLayer)]

    @property
    def first(self) -> SketchLayer:
        """The first layer that can be compressed."""
        return self.sketches[0]

    @property
    def tokens(self) -> int:
        """Tokens that the cache has seen."""
        return self.first.stream.seen

    def _compresses(self, layer: SketchLayer) -> bool:
        """Whether the slots of a layer are compressed, or will be once its new tokens settle."""
        stream, prefill = layer.stream, layer.pending > 1
        waits = stream.waits and self.plan.ready(stream, prefill)
        return stream.compressed or stream.due(prefill) or waits

    def attend(
        self, layer: SketchLayer, kernel: Kernel, name: str, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What a model's attention module calls instead of ``kernel``: see ``attention``. The layer
        is compressed afterwards, if due."""
        reading = self.reading
        again = None if reading is None else reading.again
        turn = LayerTurn(
            self.masks,
            layer is self.first,
            functools.partial(self._is_last, layer),
            reading is not None,
            again,
            functools.partial(self._compresses, layer),
            self.soon(layer),
            functools.partial(self.settle, layer, prefill=True),
        )
        try:
            before = layer.stream.compressed
            out, weights, observed = attention(layer, turn, kernel, name, *args, **kwargs)
            self.measured |= layer.stream.compressed and not before
            self.observe(layer, observed)
        except KVSketchError:
            self.undo()
            raise
        if again is not None and again.stops and self.over:
            raise ReadEnough
        return out, weights

    def observe(self, layer: SketchLayer, observed: Observed | None) -> None:
        """Take the queries of one reader of a layer's new tokens; after all readers, the layer is
        compressed if due.

        Args:
            observed: None if tokens are never compressed.
        """
        reading = self.reading
        if not layer.attended(observed, asking=reading is not None):
            return
        interface.close(layer)
        asked, q = layer.taken()
        if reading is not None and reading.again is not None:
            if asked is not None:
                reading.ask(layer, asked)
            else:  # nothing will ever be compressed
                layer.stream.drop(q)
        elif layer.record_past:
            layer.keep_unverified(asked, q)
        else:
            counts = reading is None or reading.first_counts
            if reading is not None and reading.echoed and asked is not None:
                stream = layer.stream
                stream.scores.hear(stream.page, stream.seen, asked, reading.echoed)
            self.settle(layer, asked if counts else None, prefill=q > 1)
        if layer in self._open:
            self._open.remove(layer)
        self._end()

    def soon(self, layer: SketchLayer) -> bool:
        """Whether a layer can be compressed while others have not read the same tokens: its budget,
        if it is not known, follows from its own first ones, and is not divided anew."""
        plan = self.plan
        return not (plan.solver.needs_prompt if layer.stream.waits else plan.renews)

    def settle(self, layer: SketchLayer, observed: Observed | None, prefill: bool) -> None:
        """Let a layer compress, or the plan give budgets that follow from its prompt. Of more of a
        prompt, a short part waits for the next forward (``settle_part``)."""
        if prefill and observed is not None:
            if layer is self.first:
                hold, stream = layer.holds or self.reading is not None, layer.stream
                waits = stream.pace.may_wait(stream.page, stream.seen, stream.chunk)
                self._waits = waits and not hold
            if self._waits:
                self._part.append((layer, observed))
                return
        layer.stream.scores.answers = False
        self._settle(layer, observed, prefill)

    def settle_part(self, answers: bool) -> None:
        """Settle the newest part of the text, if it waits.

        Args:
            answers: tokens will be decoded after it. Then it is a question, whose tokens are kept
                while it is answered: a long answer needs the end of a long question late. A
                document that is followed by another one must not displace those before it so.
        """
        self.leave_inference_mode()
        part, self._part = self._part, []
        for layer, observed in part:
            layer.stream.scores.answers = answers
            self._settle(layer, observed, True)

    def _settle(self, layer: SketchLayer, observed: Observed | None, prefill: bool) -> None:
        stream = layer.stream
        hold = layer.holds or self.reading is not None or (prefill and self.masks.blank)
        sampled = self.reading is not None and self.reading.echoed > 0
        scores = stream.scores
        if prefill and scores.echo is not None and not (sampled or self.plan.asks_again(stream)):
            scores.echo = None
        if prefill and not hold and observed is not None:
            if layer is self.first:
                ready = self.plan.renews and stream.asks_piece
                self._renews = ready and self.plan.ready(stream, prefill)
            if self._renews:
                stream.reopen()
            piece = stream.waits and (stream.pace.streaming or stream.begun)
            if piece and stream.method.requires.echo and self.plan.asks_again(stream):
                scores.ask_piece_again(stream.parted, observed, stream.chunk)
                observed = None
        done = stream.settle(observed, prefill, hold, later=True)
        if done and not prefill and stream.due(prefill):
            self._due.append(stream)
            return
        if stream.waits:
            streams = [sketch.stream for sketch in self.sketches]
            done = self.plan.hand_down(stream, streams, prefill, hold)
        self.measured |= done and prefill
        if done or prefill:
            self.note_bytes()
        if stream.compressed:
            self.masks.settled = True

    def finish_reading(self, sample: Tensor | None) -> None:
        """``prefill`` has read the context (of a second reading only a ``sample``): compress if
        due."""
        self.reading = None
        for layer in self.sketches:
            if sample is not None:
                layer.stream.scores.complete(layer.stream.page, sample)
            self.settle(layer, None, prefill=True)
        self.warn_of_error()

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
        if self._thread is None or index in self._updated or self._taking:
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
        self._taking = True

    def _start(self, thread: int) -> None:
        lengths = {self.layers[index].get_seq_length() for index in self._counted}
        if self._torn or self._taking or self._open or len(lengths) > 1:
            raise UnsupportedError(
                "a forward stopped in the middle (an exception?), or the model has fewer layers "
                "than the configuration that this SketchCache was made from, so that its layers "
                "hold different tokens: call reset() and read the context again"
            )
        self.leave_inference_mode()
        self._before = lengths.pop() if lengths else 0
        self._updated.clear()
        self._renews = False
        self._thread = thread

    def updated(self, index: int) -> None:
        """Layer ``index`` has new tokens."""
        self._updated.add(index)
        layer = self.layers[index]
        if not isinstance(layer, SketchLayer):
            self._taking = False
            self._end()
            return
        self._open.append(layer)
        self._taking = False
        stream = layer.stream
        if stream.pace.streaming and stream.waits and stream.seen == layer.pending:
            budgets = self.plan.known(self.sketches.index(layer), stream)
            if budgets is not None:
                stream.pace.start(budgets)
        if layer.pending > 1:
            self.note_bytes()
        interface.updated(layer, self, shared=layer.settings.readers > 1)

    def take_over(
        self, layers: Sequence[SketchLayer], last: SketchLayer | None, returned: Any
    ) -> None:
        """Go on with a forward that something else has begun.

        Args:
            layers: those that have attended to its one token.
            last: the one that took it and has not attended yet; None: there is none.
            returned: what the update of the last one has returned.
        """
        begun = [*layers] if last is None else [*layers, last]
        self._thread, self._before = threading.get_ident(), begun[0].stream.seen - 1
        self._updated = {self.layers.index(layer) for layer in begun}
        if last is not None:
            last.resumed(returned)
            self._open.append(last)

    def crop(self, tokens_to_remove: int, put_back: Callable[[], None] | None = None) -> None:
        """Remove the last tokens of all layers (a negative number); those before them that were
        kept unverified are compressed now, if due. ``put_back`` does so for what is not compressed,
        in the place of transformers' methods, which cannot remove tokens from windows and states.
        """
        if put_back is None:
            self.check_crop(-tokens_to_remove)
        else:
            put_back()
        for layer in self.layers:
            if tokens_to_remove or getattr(layer, "record_past", False):
                if put_back is None:
                    layer.crop(tokens_to_remove)
                elif isinstance(layer, SketchLayer):
                    SketchLayer.crop(layer, tokens_to_remove)
            if isinstance(layer, SketchLayer):
                stream, pace = layer.stream, layer.stream.pace
                for observed in layer.verified():
                    above = not pace.streaming and pace.above(stream.page, stream.seen)
                    self._settle(layer, observed, prefill=above)
        self.compress_due(self._due)
        self.note_bytes()
        self.masks.cut(self.tokens)

    def end_recording(self) -> None:
        """No longer keep tokens that ``crop`` may remove: it has not been called for so long that
        assisted decoding is over, which transformers does not say."""
        self.crop(0)
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def leave_inference_mode(self) -> None:
        """Outside of ``torch.inference_mode``, where its tensors must not be written to, hold
        copies of them. To be called before anything is written."""
        if torch.is_inference_mode_enabled():
            self.inference = True
        elif self.inference:
            for layer in self.sketches:
                layer.map_batch(torch.clone)
            self.masks.map_batch(torch.clone)
            self.inference = False

    def _is_last(self, layer: SketchLayer) -> bool:
        """Whether the forward ends with the attention of ``layer``."""
        return self._open == [layer] and len(self._updated) == len(self._counted)

    @property
    def part_waits(self) -> bool:
        """Whether the newest part of the text waits for what follows it."""
        return self.over and bool(self._part)

    @property
    def over(self) -> bool:
        """Whether every layer has attended to the newest tokens."""
        return self._thread is None

    def _end(self) -> None:
        if not self._open and len(self._updated) == len(self._counted):
            self.compress_due(self._due)
            self._thread = None
            self.masks.forget()
            if self.first.guessed:
                self.end_recording()
            if self.measured:
                self.warn_of_error()

    def compress_due(self, streams: Sequence[Stream]) -> None:
        """Compress the layers that decoded tokens have made due, together."""
        due, self._due = [stream for stream in streams if stream.due(prefill=False)], []
        if due:
            compress_together(due)
            self.note_bytes()
            self.masks.settled = True

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
                interface.close(layer)
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
        self._part, self._due = [], []  # of a forward that failed
        self._updated.clear()
        self._open.clear()
        self._thread, self._taking = None, False
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
        own += sum(observed.queries.nbytes for _, observed in self._part)
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
