"""SketchCache: a transformers cache whose memory stays at a budget."""

from __future__ import annotations

import copy
from collections.abc import Mapping
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

from ..arguments import PREFILL_MODES
from ..budget import Schedule
from ..cache import Curves, HeadBudgets, RetrievalHeads, Stream, make_plan, windowed
from ..cache.curves import model_of
from ..cache.plan import BY_NEED
from ..cache.storage import CHOICES, FULL, MEASURED
from ..errors import InputError, UnsupportedError, at_least
from ..methods.registry import Method, class_of, default_allocation, default_bits, default_schedule
from ..methods.sketches import Sketch
from ..methods.window import check_window
from . import accounting, adapters, compiled, interface, models, saving
from .chunks import Chunks
from .forward import Forward
from .hybrid_layer import HybridSketchLayer
from .latent import LatentSketchLayer
from .layer import LayerSettings, SketchLayer


class SketchCache(Cache):  # type: ignore[misc]
    """Pass it to ``model.generate(..., past_key_values=cache)``.

    Full-attention layers keep at most ``budget`` slots per KV head; sliding-window,
    linear-attention and convolution layers stay as transformers has them. Neither the model nor its
    configuration is changed: attention becomes ours between this cache's update and the kernel the
    model asks for (see ``interface``), so any of its ``attn_implementation`` will do.

    Args:
        config: the model's configuration.
        method: a name in ``kvsketch.ALL_METHODS``, or a class of one's own, or a
            ``Compressor``. A natively streaming sketch gets what sinks and recent tokens leave of
            the budget: as many slots as its whole state may have for the bytes of these tokens.
        budget: slots kept per KV head (int) or kept fraction of the tokens seen (float in (0, 1]),
            sinks and recent tokens included; default 0.5, unless there is a tolerance. Where a
            fraction leaves no room for them (a short prompt), the recent window shrinks first.
        sink: first tokens kept as they are.
        recent: last tokens kept as they are.
        buffer: slots decoding may run above the budget before it is compressed to as many below;
            default 2.5% of the budget.
        prefill: "exact": the prompt attends to all of itself. Each layer is compressed as soon as
            its attention is done, so that one layer's full cache is alive at a time (of budgets
            that are measured on this prompt see ``allocation``). "streaming": with
            ``generate(prefill_chunk_size=...)`` every chunk attends to slots and itself, and the
            cache never holds more than budget + chunk.
        prompt_length: "exact" with ``prefill_chunk_size``: tokens of the first prompt, so that
            compression waits for its last chunk (a cache cannot see how many are to come).
            Without it, chunks after the first attend to compressed ones, as in "streaming", and a
            UserWarning says so where chunks can be told from questions behind a context.
        one_shot: compress prompts only and keep decoded tokens exactly.
        bits: 16: slots are stored as they come. 8 or 4: those between sinks and recent window in
            so many bits (keys per channel, values per token); ``budget=1.0`` then only quantises.
            "measured" (heavy_merge's own way where the prefill is exact): as many bits for keys and
            for values of each layer, and as many slots for the bytes of ``budget`` slots in 16
            bits, as err least on the first prompt; ``summary`` says what was chosen, and
            all stay in 16 bits while they fit the budget. Few bits make decoding slower. Not with
            a natively streaming sketch.
        schedule: shares of the budget, one per compressed layer or one per layer and KV head,
            with mean 1. Default: the method's own (pyramidkv), else the same everywhere. Heads of
            equal share are kept together; memory falls as the shares say.
        tolerance: instead of a budget: every KV head keeps the fewest slots (a fraction of the
            tokens) whose measured relative error stays within it; heads that cannot be compressed
            stay exact. Measured on queries of the first prompt that the method has not seen.
        max_budget: what a tolerance may keep on average over layers and heads, as ``budget``; it
            wins over the tolerance, and ``summary`` says which heads are above it.
        allocation: "even": the same budget for every head (or ``schedule``). "measured": the same
            total, spent where it lowers the error most, measured on the first prompt (heavy_merge's
            own way where the prefill is exact and nothing else is given). Curves, or
            the path of a file of them (``Curves.save``): as measured before, on prompts of the
            user's kind; better than "measured" where what is asked differs from what was read.
            "layer" and "global": the slots that the method scores highest among all heads of a
            layer (AdaKV), or of the model (KVzip), for which all layers wait uncompressed; with
            methods that score by queries, as is "variance" (d2o's own way): more for the layers
            whose tokens are attended to more evenly. ``RetrievalHeads``: a share ``budget`` of the
            heads keep all tokens, the others sinks and recent window (DuoAttention).
            "measured", and a tolerance with ``max_budget``, compare all layers: a layer that is
            measured is meanwhile compressed to the most its heads may get, so that about half of
            an uncompressed cache is held at most (of a natively streaming sketch, all of it).
            Prompts too short to measure on (about 100 tokens) wait for more.
        track_positions: remember which token every slot was (4 bytes a slot), so that a later
            ``attention_mask`` may hide tokens that were kept. Without it, and for slots that stand
            for several tokens, such a mask is refused.
        track_error: keep the exact answers of 32 prompt queries up to date, so that ``error`` can
            say what the slots get wrong at any later time.
        options: further arguments of the method, such as ``{"delta": 2.0, "t": 4}`` for subgen.
        seed: of every random choice.

    Raises:
        InputError: any argument out of range, or two that exclude each other; nothing is changed.
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
        sink: int = 4,
        recent: int = 32,
        buffer: int | None = None,
        prefill: str = "exact",
        prompt_length: int | None = None,
        one_shot: bool = False,
        bits: int | str | None = None,
        schedule: Schedule | None = None,
        tolerance: float | None = None,
        max_budget: int | float | None = None,
        allocation: str | Path | Curves | RetrievalHeads | None = None,
        track_positions: bool = False,
        track_error: bool = False,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        #: what it was made with, by name
        self.arguments = _arguments(locals())
        #: what its owner says of it: kept by ``save``
        self.about: dict[str, Any] = {}
        self._marks: dict[str, Any] = {}  # of the model, of a cache that was loaded
        self._tokenizer: str | None = None
        if not isinstance(config, PretrainedConfig):
            raise InputError(f"config must be the model's config, got {type(config).__name__}")
        if prefill not in PREFILL_MODES:
            raise InputError(f"prefill={prefill!r} must be one of {', '.join(PREFILL_MODES)}")
        sink, recent = check_window(sink, recent)
        if prompt_length is not None:
            at_least("prompt_length", prompt_length, 1)
        cls = class_of(method)
        self.method = cls.name
        if allocation is None:
            own = schedule is None and tolerance is None and prefill == "exact"
            allocation = default_allocation(method) if own else "even"
        heads_told = isinstance(allocation, RetrievalHeads)
        if heads_told and issubclass(cls, Sketch):
            raise InputError(
                f"allocation=RetrievalHeads keeps all tokens of a head, which method={cls.name!r} "
                "does not; use a Compressor, such as 'streaming_llm'"
            )
        if bits is None:
            bits = default_bits(method) if prefill == "exact" and not heads_told else 16
        # a share of 1: nothing to choose
        exact = isinstance(budget, Real) and not isinstance(budget, Integral) and budget == 1
        choices = CHOICES if bits == MEASURED and not exact else (FULL,)
        self.plan = plan = make_plan(
            budget, tolerance, max_budget, allocation, schedule, prefill, choices
        )
        self.budget, self.tolerance = plan.budget, plan.tolerance
        self.bits = bits
        for name, given in (("budget", plan.budget), ("max_budget", plan.max_budget)):
            if given is not None and isinstance(given.value, int) and given.value < sink + recent:
                raise InputError(
                    f"{name}={given.value} is smaller than sink={sink} + recent={recent}: raise "
                    "the budget or lower sink and recent"
                )
        grows = plan.budget is not None and plan.budget.is_fraction and plan.budget.value < 1
        if grows and prefill == "streaming" and not getattr(cls, "grows", True):
            raise InputError(
                f"budget={budget!r} with prefill='streaming' grows with the prompt, and the size "
                f"of {cls.name!r} is for good once it is made: pass an int (slots per KV head), "
                "or prefill='exact'"
            )
        if plan.kind in BY_NEED and not getattr(cls, "needs_queries", False):
            raise InputError(
                f"allocation={plan.kind!r} compares scores of queries over heads, and "
                f"method={cls.name!r} has none; use 'even' or 'measured'"
            )
        models.check_supported(config)
        if getattr(cls, "needs_output", False):
            models.check_projection(config, cls.name)
        self.max_positions = models.max_positions(config)
        layers, chosen = models.layers_of(config)
        readers = models.readers_of(config, layers)
        adapter = adapters.of(config.get_text_config(decoder=True))
        track_positions = track_positions or (adapter is not None and adapter.needs_positions)
        heads = models.kv_heads_of(config, chosen[0])
        self._forward = Forward(config, plan, getattr(cls, "needs_reread", False))
        whole = plan.budget is not None and plan.budget.is_fraction and plan.budget.value >= 1
        if plan.kind == "even" and plan.budget is not None:
            plan.schedule = default_schedule(method, len(chosen), plan.budget, recent)
        budgets: list[HeadBudgets | None] = plan.begin(
            len(chosen), heads, sink + recent, model_of(config)
        )
        for place, index in enumerate(chosen):
            made = windowed(method, sink, recent, seed + index, options)
            stream = Stream(made, budgets[place], buffer, one_shot, bits, track_error)
            settings = LayerSettings(
                exact_prefill=prefill == "exact",
                prompt_length=prompt_length,
                track_positions=track_positions,
                readers=readers[index],
                lossless=whole and bits in (16, MEASURED),
            )
            if isinstance(layers[index], LinearAttentionAndFullAttentionLayer):
                states = layers[index].number_of_states
                layers[index] = HybridSketchLayer(stream, self._forward, settings, states)
            else:
                kind = LatentSketchLayer if models.has_latents(config) else SketchLayer
                layers[index] = kind(stream, self._forward, settings)
        super().__init__(layers=layers)
        self._forward.watch(self.layers)
        self._first = self._sketches()[0]
        self._chunks = Chunks(prefill == "exact" and prompt_length is None)
        self._adapter = adapter
        #: whether a compiled forward needs no break: every layer that counts tokens is plainly ours
        self._graphs = adapter is None and all(
            (type(layer) is SketchLayer and layer.settings.readers == 1)
            or not isinstance(layer, CacheLayerMixin)
            for layer in layers
        )
        self._install()

    def _install(self) -> None:
        interface.install()
        self._number = compiled.number(self)
        if self._adapter is not None:
            self._adapter.install()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``Cache.update``; see ``take``."""
        if not torch.compiler.is_compiling():
            return self.take(key_states, value_states, layer_idx, *args, **kwargs)
        if self._graphs:
            compiled.traced(self._number, layer_idx, key_states)
            return key_states, value_states
        return self._outside(key_states, value_states, layer_idx, *args, **kwargs)

    @interface.uncompiled
    def _outside(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.take(*args, **kwargs)

    def take(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to a layer and return what to attend to.

        Raises:
            InputError: a prompt that runs beyond the model's positions, bad keys or values, or a
                layer the configuration does not have.
            UnsupportedError: a forward before this one stopped in the middle, or runs in another
                thread; or the layer before did not come to our attention.
        """
        if layer_idx >= len(self.layers):
            self._forward.undo()
            raise InputError(
                f"layer_idx={layer_idx}: this SketchCache was made from a configuration of "
                f"{len(self.layers)} layers, which is not this model's"
            )
        layer = self.layers[layer_idx]
        q = key_states.shape[2] if key_states.dim() == 4 else 0
        if q > 1 and layer is self._first:
            self._chunks.note(q, layer.get_seq_length(), self._forward.masks.settled)
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
        except InputError:
            self._forward.undo()
            raise
        self._forward.updated(layer_idx)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As ``Cache.crop``: forget the last tokens. Possible until something was compressed, and
        for the tokens that came after ``activate_past_recording`` (assisted decoding).

        Raises:
            InputError: a positive number.
            UnsupportedError: tokens that may be compressed. Nothing has changed then.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.16 passes a tensor
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        self._forward.check_crop(-tokens_to_remove)
        for layer in self.layers:
            if tokens_to_remove or getattr(layer, "record_past", False):
                layer.crop(tokens_to_remove)
        self._forward.masks.cut(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._forward.masks.map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._forward.masks.map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._forward.masks.map_batch(lambda t: t[indices.to(t.device)])

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds now: keys, values, masses, scores, waiting queries,
        and room not filled yet."""
        return self._forward.nbytes()

    @property
    def peak_nbytes(self) -> int:
        """The most bytes the cache ever held."""
        return self._forward.peak_nbytes

    def exact_nbytes(self) -> int:
        """Bytes an uncompressed cache of the same tokens would hold."""
        return sum(accounting.exact_nbytes(layer) for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """What is kept and what it costs, overall and per layer. ``slots`` is per KV head, the
        mean over compressible layers; bytes are measured from live tensors. ``bits`` of a layer
        are those of its keys and of its values between sinks and recent window. ``exact_heads``
        hold all their tokens; ``above_tolerance`` are those that ``max_budget`` keeps from it."""
        return accounting.summary(self)

    def error(self) -> list[dict[str, Any]]:
        """Measured relative error |z - exact| / |exact| of every compressible layer and KV head,
        over up to 32 of the prompt's last queries; the largest of the batch rows.

        ``prompt``: right after the prompt was compressed (its queries asked again; a query-aware
        method has seen them, so what follows may fare worse). ``now`` (with ``track_error``): over
        all tokens seen since, as if the same queries were asked now. 0 for what is not compressed;
        None where a head was compressed but nothing could be measured: compressed first while
        decoding.
        """
        return accounting.measured(self.layers)

    def save(
        self, path: str | Path, *, tokenizer: Any = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write everything to one file (safetensors with a JSON header, no pickle): what ``load``
        gives back goes on with the same bytes, random choices included. The file appears whole or
        not at all.

        Args:
            tokenizer: of the model; ``load`` then refuses another.
            about: what JSON can hold, kept as ``about``; default: as it is.

        Raises:
            InputError: it cannot be written (no such folder, a full disk), or ``about`` holds what
                JSON cannot. An older file is untouched.
            UnsupportedError: what cannot be saved, by name: an empty cache, a method of one's own,
                a forward that is not over, assisted decoding. Nothing is written then.
        """
        saving.save(self, path, tokenizer, about)

    @classmethod
    def load(
        cls, path: str | Path, model: PreTrainedModel, *, tokenizer: Any = None
    ) -> SketchCache:
        """Read what ``save`` wrote, onto the devices of the model. Every length, name, shape and
        number is checked before a cache is built from it.

        Args:
            model: that the cache was made with: the same weights in the same dtype.
            tokenizer: of the model; refused if the text was read by another.

        Raises:
            InputError: no such file, truncated, damaged, of another version, model or tokenizer.
        """
        return saving.load(cls, path, model, tokenizer)

    def fork(self, copies: int = 1) -> SketchCache:
        """A cache that goes on from here by itself. Slots in few bits, and tokens of which nothing
        was compressed, are never written into, so both share them; the rest is copied.

        Args:
            copies: every row so many times, side by side. A method that chooses at random chooses
                for each what it would choose for one.

        Raises:
            InputError: copies < 1.
        """
        at_least("copies", copies, 1)
        shared: list[Any] = [self._forward._config, self.plan.curves, self.plan.retrieval]
        twin = copy.deepcopy(self, {id(one): one for one in shared if one is not None})
        if copies > 1:
            batch = self._sketches()[0].token_shape[0]
            twin.batch_repeat_interleave(copies)
            for layer in twin._sketches():
                layer.stream.number_rows(torch.arange(batch).repeat_interleave(copies))
        return twin

    def reset(self) -> None:
        """Forget everything; settings stay."""
        self._forward.reset()

    def __bool__(self) -> bool:
        """Whether it holds tokens. Phi-3's ``generate`` asks, before it drops a cache that is too
        short for its rotary frequencies; an empty one is not."""
        return bool(self.get_seq_length() > 0)

    @property
    def max_cache_len(self) -> int:
        """There is none. PEFT's prefix tuning asks, before it puts a cache of its own in place of
        this one."""
        raise _NoFixedLengthError(
            "this SketchCache has no max_cache_len. If PEFT asks: prefix tuning replaces the cache "
            "it is given by one that holds its prefix, so it cannot be compressed; merge the "
            "adapter, or use LoRA or prompt tuning"
        )

    def _sketches(self) -> list[SketchLayer]:
        return self._forward.sketches

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, perhaps in a new process: attention has to become ours there, too."""
        self.__dict__.update(state)
        self._install()


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k not in ("self", "config", "__class__")}


class _NoFixedLengthError(UnsupportedError, AttributeError):
    """An attribute that is not there, with its reason."""
