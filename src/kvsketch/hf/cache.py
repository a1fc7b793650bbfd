"""SketchCache: a transformers cache whose memory stays within a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
)

from kvsketch.arguments import RECENT, check_budget, check_former, check_prefill, check_types
from kvsketch.budget import Budget, plain
from kvsketch.cache import HeadBudgets, RetrievalHeads, Stream, make_plan, windowed
from kvsketch.cache.curves import model_shape
from kvsketch.cache.make_plan import Allocation
from kvsketch.cache.storage import CHOICES, MEASURED, bits_of
from kvsketch.errors import InputError, KVSketchError, UnsupportedError, at_least
from kvsketch.hf import accounting, adapters, compiled, generating, interface, models, saving
from kvsketch.hf.chunks import Chunks
from kvsketch.hf.compaction import compact, pin
from kvsketch.hf.decoding import Decoding
from kvsketch.hf.forward import Forward
from kvsketch.hf.history import History
from kvsketch.hf.hybrid_layer import HybridSketchLayer
from kvsketch.hf.identity import Origin
from kvsketch.hf.latent import LatentSketchLayer
from kvsketch.hf.layer import LayerSettings, SketchLayer
from kvsketch.hf.rotary import check_rotary
from kvsketch.kernels import paged
from kvsketch.methods.registry import (
    Method,
    class_of,
    default_allocation,
    default_bits,
    default_schedule,
)
from kvsketch.methods.window import check_window
from kvsketch.page.quantized import FULL


class SketchCache(Cache):  # type: ignore[misc]
    """A KV cache of bounded size for ``model.generate(..., past_key_values=cache)``.

    Full-attention layers keep at most the bytes of ``budget``. Sliding-window,
    linear-attention and convolution layers keep the cache that transformers gives them. Neither the
    model nor its configuration is changed: kvsketch takes over attention between this cache's
    update and the kernel that the model requests (see ``interface``), so every
    ``attn_implementation`` works.

    Args:
        config: the model's configuration.
        method: a name in ``kvsketch.ALL_METHODS``, a subclass of ``Compressor``, or a
            ``Compressor`` object. A streaming sketch gets the part of the budget that sinks and
            recent tokens leave; its whole state takes at most the bytes of that many tokens.
        budget: the bytes that may be kept, as those of so many tokens per KV head (int) or of this
            fraction of the tokens seen (float in (0, 1]) in the model's own dtype; default 0.5,
            unless there is a tolerance. In that dtype (``bits=16``) it is the number of slots that
            are kept, including sinks and recent tokens; in fewer bits the same bytes hold more
            slots. Masses and scores (4 bytes each per slot, where a method has them) count in
            fewer bits and come on top in 16. If a fraction is too small for sinks and recent
            tokens (a short prompt), the recent window shrinks first. An ``AccuracyWarning`` is
            given where the measured error is above 35%.
        sink: number of first tokens that are kept unchanged.
        recent: number of last tokens that are kept unchanged; default 32, and with ``bits`` 8, 4 or
            "measured" at most an eighth of the budget, unless ``prefill="streaming"``: a token then
            takes the bytes of three to four slots.
        prefill: "exact": every token of the prompt attends to all earlier ones. Each layer is
            compressed as soon as its attention is computed, so that only one layer's full cache
            exists at a time (for budgets that are measured on this prompt, see ``allocation``).
            "streaming": the prompt is compressed while it is read, in pieces of at most 1,024
            tokens that end at multiples of 1,024 or with a forward, so that the cache never holds
            more than the budget, a buffer of 2.5% of it, and the tokens of one forward (read it
            with ``generate(prefill_chunk_size=1024)``). With ``bits`` and a budget that are
            numbers, slots are those of vLLM's pages with ``PageScheduler``. With a streaming
            sketch, each chunk is compressed. A number: "exact", for a first
            prompt of so many tokens that is read in chunks: compression waits for the last one (a
            cache cannot see how many chunks follow). With "exact", chunks after the first attend to
            compressed ones; a UserWarning is given if they can be distinguished from questions
            after a context.
        bits: 16: slots are stored in the model's dtype, whichever it is. 8 or 4: slots between
            sinks and recent window are stored in this many bits (keys per channel, values per
            token), as many of them as the bytes of ``budget`` hold; ``budget=1.0`` then only
            quantises. "measured" (heavy_merge's default): the most bits in which all tokens of the
            first prompt (of its first piece, if it streams) fit the bytes, or else the fewest; if
            budgets follow from measured errors, for each layer the bits of keys and of values and
            the number of slots with the smallest error on it. ``summary`` reports the choice. A
            budget that is a number of tokens leaves prompts that fit it unchanged. Not with a
            streaming sketch.
        tolerance: every KV head keeps the fewest slots (a fraction of the tokens) whose measured
            relative error stays within it; heads that cannot be compressed keep all tokens. The
            error is measured on queries of the first prompt that the method has not seen.
            ``budget`` then limits the average over layers and heads and takes precedence;
            ``summary`` lists the heads that exceed the tolerance.
        allocation: how the budget is divided among layers and heads. "even": the same budget for
            every head (a method may have shares of its own: pyramidkv). A list of shares with mean
            1, one per compressed layer or one per layer and KV head. "measured": the same total,
            allocated where it reduces the error most, measured on the first prompt. (heavy_merge's
            default with an exact prefill is "global" where the prompt's own queries can be asked
            again, see ``cache.echo``, and after a second reading by ``prefill``; else "measured".)
            Curves, or the path of a file of them
            (``Curves.save``): by errors measured beforehand on typical prompts; better than
            "measured" if the questions differ from the text that was read. "layer" and "global":
            keep the slots of highest score among all heads of a layer (AdaKV) or of the model
            (KVzip); with "global" and "variance" all layers stay uncompressed until the prompt is
            read, except after an echo. Scores of an echo divide the budget anew where more of a
            prompt is compressed. "variance" (d2o's default): more for layers whose tokens are
            attended to more evenly. These three need a method that scores by queries.
            ``RetrievalHeads``: a fraction ``budget`` of the heads keep all tokens, the others sinks
            and recent window (DuoAttention). "measured", and a tolerance with a budget, compare all
            layers: until the last layer is measured, each layer is compressed to the most that its
            heads may get, so that the peak is about half of an uncompressed cache (with a streaming
            sketch, all of it). Prompts too short to measure (about 100 tokens) are kept until there
            are more tokens.
        keep: what is kept besides the slots of the budget, a list of names. "decoded": all decoded
            tokens, unchanged, so that only prompts are compressed (SubGen, section 3.2).
            "positions": the position of every slot (4 bytes each), so that a later
            ``attention_mask`` may mask kept tokens; without it, and for slots that represent
            several tokens, such a mask is refused. "errors": the exact attention outputs of 32
            prompt queries, so that ``error`` can also measure the error at any later time.
        options: options of the method, such as ``{"delta": 2.0, "t": 4}`` for subgen.
        seed: seed of all random choices.

    A cache continues its own text. ``generate`` is given the ids of all that the cache has seen,
    followed by new ones, and transformers passes on only the new ones. Another text is refused:
    call ``reset``, or make a new cache for it. (Of tokens that neither ``generate`` nor ``prefill``
    has read only their number is known.)

    More of a text that is read after a compression, and takes at most half of the slots, waits for
    the next forward (methods with an echo, exact prefill). If that decodes a token, the part is a
    question, whose tokens are kept while it is answered; a document that more text follows is
    compressed like any other. Until then it takes its own bytes and those of its queries beyond the
    budget; ``settle`` ends the wait.

    Raises:
        InputError: an argument is out of range, or two exclude each other.
        UnsupportedError: the model's attention cannot be replaced, or it has no layer to compress.

    Example:
        >>> cache = SketchCache(model.config, budget=0.25)                 # doctest: +SKIP
        >>> ids = model.generate(**inputs, past_key_values=cache)          # doctest: +SKIP
        >>> cache.summary()["kv_bytes"]                                    # doctest: +SKIP
    """

    def __init__(
        self,
        config: PretrainedConfig,
        method: Method = "heavy_merge",
        *,
        budget: int | float | None = None,
        tolerance: float | None = None,
        allocation: Allocation | None = None,
        bits: int | str | None = None,
        prefill: str | int = "exact",
        sink: int = 4,
        recent: int | None = None,
        keep: Collection[str] = (),
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **former: Any,
    ) -> None:
        budget, tolerance, bits = map(plain, (budget, tolerance, bits))
        sink, recent, prefill, seed = map(plain, (sink, recent, prefill, seed))
        arguments = _arguments(locals())
        check_former(former, arguments)
        check_types(seed, options, keep)
        #: the arguments, by name
        self.arguments = {**arguments, "keep": sorted(keep)}
        #: the user's description, stored by ``save``
        self.about: dict[str, Any] = {}
        self._marks: dict[str, Any] = {}  # identify the model of a cache that was loaded
        #: the model, known from ``generate``, ``prefill`` and ``compressing``
        self.origin, self.history = Origin(), History()
        self._tokenizer: str | None = None
        if not isinstance(config, PretrainedConfig):
            raise InputError(f"config must be the model's config, got {type(config).__name__}")
        check_prefill(prefill)
        prompt_length = prefill if isinstance(prefill, int) else None
        streaming = prefill == "streaming"
        sink, window = check_window(sink, RECENT if recent is None else recent)
        cls = class_of(method)
        self.method = cls.name
        reread = None
        if allocation is None:
            own = tolerance is None and not streaming
            allocation = default_allocation(method) if own else "even"
            reread = getattr(cls, "allocation_reread", None) if own else None
        heads_told = isinstance(allocation, RetrievalHeads)
        if heads_told and not cls.recompresses:
            raise InputError(
                f"allocation=RetrievalHeads keeps all tokens of a head, which method={cls.name!r} "
                "does not; use a Compressor, such as 'streaming_llm'"
            )
        if bits is None:
            bits = 16 if heads_told else default_bits(method)
        # a fraction of 1: nothing to choose
        exact = isinstance(budget, Real) and not isinstance(budget, Integral) and budget == 1
        stored = bits_of(bits) or FULL
        choices = CHOICES if bits == MEASURED and not exact else (stored,)
        self.plan = plan = make_plan(budget, tolerance, allocation, prefill, choices, reread)
        self.budget, self.tolerance = plan.budget, plan.tolerance
        self.bits = bits
        limit = plan.budget or plan.max_budget
        if limit is not None:
            check_budget(limit, sink, window)
        grows = plan.budget is not None and plan.budget.is_fraction and plan.budget.value < 1
        if grows and streaming and not getattr(cls, "grows", True):
            raise InputError(
                f"budget={budget!r} with prefill='streaming' grows with the prompt, and the size "
                f"of {cls.name!r} is fixed once it is made: pass an int (the bytes of so many "
                "tokens per KV head), or prefill='exact'"
            )
        if plan.solver.compares and not cls.requires.queries:
            raise InputError(
                f"allocation={plan.kind!r} compares scores of queries over heads, and "
                f"method={cls.name!r} has none; use 'even' or 'measured'"
            )
        models.check_supported(config)
        if cls.requires.output:
            models.check_projection(config, cls.name)
        if cls.requires.rotary:
            check_rotary(config, cls.name)
        self.max_positions = models.max_positions(config)
        layers, chosen = models.layers_of(config)
        readers = models.readers_of(config, layers)
        adapter = adapters.of(config.get_text_config(decoder=True))
        positions = "positions" in keep or (adapter is not None and adapter.needs_positions)
        heads = models.kv_heads_of(config, chosen[0])
        self._forward = Forward(config, plan, cls.requires.second_reading == "required")
        whole = plan.budget is not None and plan.budget.is_fraction and plan.budget.value >= 1
        if plan.kind == "even" and plan.budget is not None:
            plan.solver.prefer(default_schedule(method, len(chosen), plan.budget, window))
        budgets: list[HeadBudgets | None] = plan.begin(
            len(chosen), heads, sink + window, model_shape(config)
        )
        for place, index in enumerate(chosen):
            made = windowed(method, sink, window, seed + index, options)
            kept = {"one_shot": "decoded" in keep, "track_error": "errors" in keep}
            goal = plan.budget if recent is None else None
            stream = Stream(made, budgets[place], bits=bits, streaming=streaming, goal=goal, **kept)
            settings = LayerSettings(
                exact_prefill=not streaming,
                prompt_length=prompt_length,
                track_positions=positions,
                readers=readers[index],
                lossless=whole and bits in (16, MEASURED),
                config=config,
            )
            if isinstance(layers[index], LinearAttentionAndFullAttentionLayer):
                states = layers[index].number_of_states
                layers[index] = HybridSketchLayer(stream, settings, states)
            else:
                kind = LatentSketchLayer if models.has_latents(config) else SketchLayer
                layers[index] = kind(stream, settings)
        super().__init__(layers=layers)
        self._forward.watch(self.layers)
        self._first = self._sketches()[0]
        self._decoding: Decoding | None = None  # of the forward that runs
        self._chunks = Chunks(prefill == "exact")
        self._adapter = adapter
        #: whether a compiled forward needs no graph break: every layer that counts tokens is a
        #: plain SketchLayer
        self._graphs = adapter is None and all(
            (type(layer) is SketchLayer and layer.settings.readers == 1)
            or not isinstance(layer, CacheLayerMixin)
            for layer in layers
        )
        self._install()

    def _install(self) -> None:
        interface.install()
        generating.install(SketchCache)
        self._number = compiled.number(self)
        if self._adapter is not None:
            self._adapter.install()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``Cache.update``; see ``take``."""
        if not torch.compiler.is_compiling():
            if layer_idx == 0:
                if torch.is_inference_mode_enabled() != self._forward.inference:
                    self._forward.leave_inference_mode()
                if self._decoding is None:  # else the last forward was a decoded token
                    self._settle_part(key_states)
                self._decoding = self._run(key_states)
            if self._decoding is not None:
                taken = self._decoding.take(layer_idx, key_states, value_states)
                if taken is not None:
                    return taken
            return self.take(key_states, value_states, layer_idx, *args, **kwargs)
        if self._graphs:
            compiled.traced(self._number, layer_idx, key_states)
            return key_states, value_states
        return self._outside(key_states, value_states, layer_idx, *args, **kwargs)

    def _settle_part(self, keys: Tensor) -> None:
        """Settle what waits for the forward that begins with these keys."""
        if self._forward.part_waits:
            decoded = keys.dim() < 4 or keys.shape[2] == 1 or self._first.record_past
            self._forward.settle_part(answers=decoded)

    def _run(self, keys: Tensor) -> Decoding | None:
        """The run of decoded tokens to which a forward belongs that begins with these keys."""
        run = self._decoding
        if run is not None:
            run.leave()  # if it was interrupted
        if not self._graphs or keys.dim() < 4 or keys.shape[2] != 1:
            return None
        if run is None or not run.takes(keys):
            run = Decoding.of(self._forward)
        return run if run is not None and run.takes(keys) else None

    @interface.uncompiled
    def _outside(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.take(*args, **kwargs)

    def take(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to a layer and return the keys and values to attend to.

        Raises:
            InputError: a prompt that exceeds the model's positions, invalid keys or values, or a
                layer that the configuration does not have.
            UnsupportedError: an earlier forward stopped in the middle, or another one runs in
                another thread; or the previous layer did not use our attention.
        """
        if layer_idx >= len(self.layers):
            self._forward.undo()
            raise InputError(
                f"layer_idx={layer_idx}: this SketchCache was made from a configuration of "
                f"{len(self.layers)} layers, which is not this model's"
            )
        layer = self.layers[layer_idx]
        self._settle_part(key_states)
        q = key_states.shape[2] if key_states.dim() == 4 else 0
        if q > 1 and layer is self._first:
            self._chunks.note(q, layer.get_seq_length(), self._forward.masks.settled)
        elif q == 1 and layer is self._first and layer.holds:
            self._chunks.wait(layer.get_seq_length() + 1, layer.settings.prompt_length or 0)
        self._forward.begin(layer_idx)
        try:
            if q > 1 and self.max_positions is not None:
                total = layer.get_seq_length() + q
                if total > self.max_positions:
                    raise InputError(
                        f"the prompt ends at token {total}, beyond the model's "
                        f"{self.max_positions} positions (max_position_embeddings)"
                    )
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        except KVSketchError:
            self._forward.undo()
            raise
        self._forward.updated(layer_idx)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As ``Cache.crop``: remove the last tokens. Possible until tokens are compressed, and for
        tokens after ``activate_past_recording`` (assisted decoding).

        Raises:
            InputError: a positive number, no whole one, or more than there are tokens.
            UnsupportedError: the tokens may be compressed already; the cache is unchanged.
        """
        tokens, seen = int(tokens_to_remove), self.get_seq_length()  # transformers passes a tensor
        if tokens > 0 or tokens != tokens_to_remove or -tokens > seen:
            raise InputError(
                f"crop({tokens_to_remove}): pass minus the number of tokens to remove, an integer "
                f"between {-seen} and 0"
            )
        self._forward.leave_inference_mode()
        self._forward.crop(tokens)
        self.history.cut(seen + tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As ``Cache.get_mask_sizes``: masks are made over all tokens seen. In a second reading of
        a context without padding, those before are visible, and the model need not make a mask over
        them (``second_reading.widened``)."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        reading = self._forward.reading
        unmasked = reading is not None and reading.again is not None and reading.again.unmasked
        if unmasked and isinstance(self.layers[layer_idx], SketchLayer):
            return query_length, length - query_length
        return length, offset

    def attend(self, layer: SketchLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The attention of one of its layers, see ``Forward.attend``."""
        return self._forward.attend(layer, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._forward.settle_part(answers=True)
        super().reorder_cache(beam_idx)
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._forward.settle_part(answers=True)
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._forward.settle_part(answers=True)
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t[indices.to(t.device)])

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch, to what the layers do not hold."""
        self._decoding = None  # which holds the pages before
        self._forward.masks.map_batch(fn)
        self.history.map_batch(fn)

    def nbytes(self) -> int:
        """Bytes of all tensors in the cache now: keys, values, masses, scores, queries that wait
        for a compression, and allocated but unused memory."""
        return self._forward.nbytes()

    @property
    def peak_nbytes(self) -> int:
        """The peak of ``nbytes``."""
        return self._forward.peak_nbytes

    def exact_nbytes(self) -> int:
        """Bytes of an uncompressed cache of the same tokens."""
        return sum(accounting.exact_nbytes(layer) for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """The size of the cache, overall and per layer. ``slots`` is per KV head, the mean over
        compressible layers; bytes are measured from live tensors. ``kv_fraction`` is ``kv_bytes``
        over ``exact_kv_bytes``, the bytes of an uncompressed cache of the same tokens; None if
        there are no tokens. ``bits`` of a layer are those of
        its keys and of its values between sinks and recent window. ``kernel`` computes the
        attention of decoded tokens. ``exact_heads`` keep all their
        tokens; ``above_tolerance`` are those that exceed the tolerance because of
        ``max_budget``."""
        above = None if self.tolerance is None else self.plan.above
        size, exact = self.nbytes(), self.exact_nbytes()
        return {
            "method": self.method,
            "budget": None if self.budget is None else self.budget.value,
            "tolerance": self.tolerance,
            "allocation": self.plan.kind,
            "bits": self.bits,
            "kernel": paged.kernel_on(self._device),
            "tokens": self.get_seq_length(),
            "pinned": self._forward.first.stream.pins.tokens,
            "slots": accounting.mean_held(self.layers),
            "kv_bytes": size,
            "exact_kv_bytes": exact,
            "kv_fraction": size / exact if exact else None,
            "peak_kv_bytes": max(self.peak_nbytes, size),
            "layers": accounting.by_layer(self.layers, above),
        }

    @property
    def _device(self) -> torch.device:
        """Of the first layer that can be compressed; the CPU while there are no tokens."""
        found = getattr(self._forward.first, "device", None)
        return found if isinstance(found, torch.device) else torch.device("cpu")

    def error(self) -> list[dict[str, Any]]:
        """Measured relative error |z - exact| / |exact| of every compressible layer and KV head,
        over up to 32 of the prompt's last queries; the largest of the batch rows.

        ``prompt``: right after the prompt was compressed, on its own queries. A method that needs
        queries has seen them, so the error on later queries may be larger. ``now`` (with
        ``track_error``): over all tokens seen since, with the same queries. 0 for heads that are
        not compressed; None if a head was compressed without a measurement, because its first
        compression was during decoding.
        """
        return accounting.measured(self.layers)

    def pin(self, start: int, end: int) -> None:
        """Never compress the tokens from ``start`` to ``end`` of the text (padding included), such
        as an instruction: they are kept as sinks are, and count in the budget; while a fraction of
        few tokens is less than what is pinned, it is exceeded. Tokens that will be read later can
        be pinned, and those that no compression has reached yet.

        Raises:
            InputError: an empty span, one that overlaps another, or more than a budget in tokens
                holds. Nothing is changed.
            UnsupportedError: some of the tokens are compressed already, a streaming sketch, or the
                middle of a forward. Nothing is changed.
        """
        self._check_idle("pin()")
        pin([layer.stream for layer in self._sketches()], self.budget, start, end)

    def compact(self, budget: int | float) -> dict[str, Any]:
        """Compress to a budget now, once, such as at the end of a turn, or before a cache is kept
        for later. The cache's own budget holds from then on: what comes next fills it again. A
        ``fork`` made before is a way back.

        Args:
            budget: as of the cache: a number of tokens, or a fraction of the tokens seen.

        Returns:
            ``slots`` per KV head and ``kv_bytes``, before and after, and ``error``, the mean error
            of the prompt's last queries over all tokens so far (with ``keep=["errors"]``, else
            None). ``dropped``: of each row, the positions of the tokens that had a slot of their
            own in some KV head before and have none now; a slot of several tokens may stand for
            them (with ``keep=["positions"]``, else None).

        Raises:
            InputError: a budget out of range, too small for sinks, recent and pinned tokens, or an
                empty cache; or a method that chooses by queries, of which a cache with
                ``budget=1.0`` keeps none. Nothing is changed.
            UnsupportedError: a streaming sketch, a cache with a tolerance, or the middle of a
                forward. Nothing is changed.
        """
        to = Budget(plain(budget))
        self._check_idle("compact()")
        if self.budget is None:
            raise UnsupportedError("compact() needs a cache with a budget, not with a tolerance")
        self._forward.leave_inference_mode()
        return compact(self._forward, to)

    def settle(self) -> None:
        """Compress what waits for the forward that follows it: a part of a text that was read after
        a compression may be a question, whose tokens are kept while it is answered. Call this after
        more of a document was read, whose questions come later. Nothing is done in the middle of a
        forward."""
        if self._forward.over:
            self._forward.settle_part(answers=False)

    def _check_idle(self, what: str) -> None:
        """Raise UnsupportedError in the middle of a forward, and for a streaming sketch."""
        if not self._forward.over:
            raise UnsupportedError(f"{what} in the middle of a forward: call it before or after")
        if self._sketches()[0].stream.compressor is None:
            raise UnsupportedError(
                f"{what}: method={self.method!r} is a streaming sketch, which keeps no token"
            )

    def save(
        self, path: str | Path, *, tokenizer: Any = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the cache to one file (safetensors with a JSON header, no pickle). A loaded cache
        continues bit for bit, including random choices. The file is written atomically. A part of a
        text that waits for what follows it is compressed before, as ``compact`` does.

        A model such as Qwen-VL keeps itself by how much images have moved the positions of its
        text (``rope_deltas``), which is not in the file: in another process, restore it before such
        a conversation continues.

        Args:
            tokenizer: the model's tokenizer; ``load`` then refuses another one.
            about: a description that JSON can represent, stored as ``about``; default: the present
                one.

        Raises:
            InputError: it cannot be written (no such folder, a full disk), there is a file of
                another kind, or JSON cannot represent ``about``. An older file is unchanged.
            UnsupportedError: a cache that cannot be saved, with the reason: an empty cache, a
                user-defined method, the middle of a forward, assisted decoding. Nothing is written.
        """
        self.settle()
        saving.save(self, path, tokenizer, about)

    @classmethod
    def load(
        cls, path: str | Path, model: PreTrainedModel, *, tokenizer: Any = None
    ) -> SketchCache:
        """Read a file that ``save`` wrote, onto the devices of the model. Every length, name, shape
        and number is checked before a cache is built from it.

        Args:
            model: the model of the cache, with the same weights in the same dtype, also compiled or
                with PEFT's adapters. Some numbers of each of its weights are compared, if
                ``generate``, ``prefill`` or ``compressing`` has read the text; else those of its
                attention.
            tokenizer: the model's tokenizer; refused if the text was encoded by another one.

        Raises:
            InputError: no such file, truncated, damaged, of another version, model or tokenizer.
        """
        return saving.load(cls, path, model, tokenizer)

    def fork(self, copies: int = 1) -> SketchCache:
        """A copy that continues independently. Slots in 8 or 4 bits, and tokens of a layer without
        compression, are never written to, so both share them; the rest is copied.

        Args:
            copies: number of copies of every row, next to each other. A random method makes the
                same choices for each copy as for a single one.

        Raises:
            InputError: copies < 1.
        """
        at_least("copies", copies, 1)
        shared: list[Any] = [self._forward._config, self.plan.curves, self.plan.retrieval]
        twin = copy.deepcopy(self, {id(one): one for one in shared if one is not None})
        twin._forward.leave_inference_mode()
        if copies > 1:
            batch = self._sketches()[0].token_shape[0]
            twin.batch_repeat_interleave(copies)
            for layer in twin._sketches():
                layer.stream.number_rows(
                    torch.arange(batch, device="cpu").repeat_interleave(copies)
                )
        return twin

    def reset(self) -> None:
        """Remove all tokens; settings are kept."""
        self._decoding, self.origin, self.history = None, Origin(), History()
        self._forward.reset()

    def __repr__(self) -> str:
        """Method, budget and size in one line; raises nothing, in whatever state the cache is."""
        try:
            return self._described()
        except Exception:  # half made, or torn in the middle of a forward
            return object.__repr__(self)

    def _described(self) -> str:
        goal = f"tolerance={self.tolerance}"
        if self.budget is not None:
            goal = f"budget={self.budget.value}"
        said, seen = f"SketchCache({self.method}, {goal}", self.get_seq_length()
        if not seen:
            return f"{said}, empty)"
        return (
            f"{said}, {seen:,} tokens seen, {accounting.mean_held(self.layers):,.0f} slots per KV "
            f"head, {self.nbytes():,} of {self.exact_nbytes():,} bytes)"
        )

    def __bool__(self) -> bool:
        """Whether it holds tokens. Phi-3's ``generate`` checks this before it drops a cache that is
        too short for its rotary frequencies."""
        return bool(self.get_seq_length() > 0)

    def _sketches(self) -> list[SketchLayer]:
        return self._forward.sketches

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoding": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, perhaps in a new process, where attention must be taken over, too."""
        self.__dict__.update(state)
        self._install()


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k not in ("self", "config", "former", "__class__")}
