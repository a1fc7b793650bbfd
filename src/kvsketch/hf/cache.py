"""SketchCache: a transformers cache whose memory stays at a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..budget import Budget, Schedule, scheduled
from ..errors import InputError, UnsupportedError
from ..streaming import (
    Curves,
    HeadGroups,
    Periodic,
    Planner,
    Waiting,
    default_allocation,
    default_schedule,
    windowed,
)
from ..streaming.periodic import Reducer
from . import accounting, mpt
from .attention import PREFIX, register
from .goal import check_curves, make_goal
from .layer import SketchLayer

PREFILL_MODES = ("exact", "streaming")


class SketchCache(Cache):  # type: ignore[misc]
    """Pass it to ``model.generate(..., past_key_values=cache)``.

    Full-attention layers keep at most ``budget`` slots per KV head; sliding-window and other
    layers stay as transformers has them. The constructor switches ``config`` to an attention
    function of ours that behaves like the one before for every other cache.

    Args:
        config: the model's own ``model.config`` (not a copy: the model reads it).
        method: a name in ``kvsketch.streaming.ALL_METHODS``: a compressor, or a natively streaming
            sketch, which gets the budget left by sinks and recent tokens at its first compression
            (each says in ``for_budget`` how close to it it stays).
        budget: slots kept per KV head (int) or kept fraction of the tokens seen (float in (0, 1]),
            sinks and recent tokens included; default 0.5, unless there is a tolerance. Where a
            fraction leaves no room for them (a short prompt), the recent window shrinks first.
        sink: first tokens kept as they are.
        recent: last tokens kept as they are.
        buffer: slots decoding may run above the budget before it is compressed to as many below;
            default 2.5% of the budget.
        prefill: "exact": the prompt attends to all of itself and each layer is compressed as soon
            as its attention is done, so one layer's full cache is alive at a time. "streaming":
            with ``generate(prefill_chunk_size=...)`` every chunk attends to slots and itself, and
            the cache never holds more than budget + chunk.
        prompt_length: "exact" with ``prefill_chunk_size``: tokens of the first prompt, so that
            compression waits for its last chunk (a cache cannot see how many are to come).
            Without it, chunks after the first attend to compressed ones, as in "streaming".
        one_shot: compress prompts only and keep decoded tokens exactly.
        bits: 16: slots are stored as they come. 8 or 4: those between sinks and recent window in
            so many bits (keys per channel, values per token); ``budget=1.0`` then only quantises.
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
            "measured", and a tolerance with ``max_budget``, compare all layers, so they hold the
            whole cache of a prompt until its last layer is done; so do prompts too short to
            measure on (about 100 tokens).
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
        method: str = "heavy_merge",
        *,
        budget: int | float | None = None,
        sink: int = 4,
        recent: int = 32,
        buffer: int | None = None,
        prefill: str = "exact",
        prompt_length: int | None = None,
        one_shot: bool = False,
        bits: int = 16,
        schedule: Schedule | None = None,
        tolerance: float | None = None,
        max_budget: int | float | None = None,
        allocation: str | Path | Curves | None = None,
        track_error: bool = False,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise InputError(f"config must be the model's config, got {type(config).__name__}")
        if prefill not in PREFILL_MODES:
            raise InputError(f"prefill={prefill!r} must be one of {', '.join(PREFILL_MODES)}")
        if prompt_length is not None and prompt_length < 1:
            raise InputError(f"prompt_length={prompt_length!r} must be an int >= 1")
        self._config = config
        self.method = method
        if allocation is None:
            own = schedule is None and tolerance is None and prefill == "exact"
            allocation = default_allocation(method) if own else "even"
        goal = make_goal(budget, tolerance, max_budget, allocation, schedule, prefill)
        self.budget, self.tolerance = goal.budget, goal.tolerance
        self.bits = bits
        for name, given in (("budget", goal.budget), ("max_budget", goal.max_budget)):
            if given is not None and isinstance(given.value, int) and given.value < sink + recent:
                raise InputError(
                    f"{name}={given.value} is smaller than sink={sink} + recent={recent}: raise "
                    "the budget or lower sink and recent"
                )
        if config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(config).__name__} is an encoder-decoder; SketchCache is for decoder-only "
                "models"
            )
        text_config = config.get_text_config(decoder=True)
        self.max_positions = _max_positions(text_config)
        self.peak_nbytes = 0
        uses_alibi = isinstance(text_config, mpt.MptConfig)
        layers = list(DynamicCache(config=config).layers)
        chosen = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        heads = _kv_heads(text_config)
        planned = tolerance is not None or allocation != "even"
        if planned:
            check_curves(goal.curves, len(chosen), heads)
        elif schedule is None and goal.budget is not None:
            schedule = default_schedule(method, len(chosen), goal.budget, recent)
        self._planner = Planner(goal, len(chosen), heads)
        per_layer: list[list[Budget]] = []
        if not planned and goal.budget is not None:
            per_layer = scheduled(goal.budget, schedule, len(chosen), [heads] * len(chosen))
        for place, index in enumerate(chosen):

            def reduce(number: int = 0, index: int = index) -> Reducer:
                # groups of one layer differ in seed, like layers do
                return windowed(method, sink, recent, seed + index + number * len(layers), options)

            def build(
                budgets: Sequence[Budget], reduce: Callable[[int], Reducer] = reduce
            ) -> Periodic | HeadGroups:
                return grouped(
                    budgets,
                    lambda share, number: Periodic(
                        reduce(number), share, buffer, one_shot, bits, track_error
                    ),
                )

            if planned:
                build([Budget(1.0)])  # bad arguments should fail now, not after the prompt
                sketch: Periodic | HeadGroups = Waiting(place, self._planner, reduce, build)
            else:
                sketch = build(per_layer[place])
            layers[index] = SketchLayer(
                sketch, prefill == "exact", prompt_length, uses_alibi, self._note_bytes
            )
        if not any(isinstance(layer, SketchLayer) for layer in layers):
            raise UnsupportedError(
                f"{type(config).__name__} has no full-attention layer to compress: all its layers "
                "have a sliding window or no KV cache"
            )
        _check_replaceable(text_config)
        super().__init__(layers=layers)
        self._bytes = [0] * len(layers)
        if uses_alibi:
            mpt.install()
        else:
            for part in {id(c): c for c in (config, text_config)}.values():
                kernel = part._attn_implementation or "eager"
                part._attn_implementation = register(kernel)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``Cache.update``.

        Raises:
            InputError: a prompt that runs beyond the model's positions, or bad keys or values.
        """
        layer = self.layers[layer_idx]
        q = key_states.shape[2] if key_states.dim() == 4 else 0
        if q > 1 and self.max_positions is not None:
            total = layer.get_seq_length() + q
            if total > self.max_positions:
                raise InputError(
                    f"the prompt ends at token {total}, beyond the model's {self.max_positions} "
                    "positions (max_position_embeddings)"
                )
        try:
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        except InputError:
            self._undo_forward(layer_idx)
            raise
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As ``Cache.crop``; refused before any layer changes once something was compressed."""
        for layer in self._sketches():
            if layer.sketch.compressed and tokens_to_remove:
                layer.crop(tokens_to_remove)  # raises
        super().crop(tokens_to_remove)

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds now: keys, values, masses, scores, waiting queries,
        and room not filled yet."""
        return sum(accounting.layer_nbytes(layer) for layer in self.layers)

    def exact_nbytes(self) -> int:
        """Bytes an uncompressed cache of the same tokens would hold."""
        return sum(accounting.exact_nbytes(layer) for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """What is kept and what it costs, overall and per layer. ``slots`` is per KV head, the
        mean over compressible layers; bytes are measured from live tensors. ``exact_heads`` hold
        all their tokens; ``above_tolerance`` are those that ``max_budget`` keeps from it."""
        layers = [
            {
                "layer": index,
                "compressed": isinstance(layer, SketchLayer) and layer.sketch.compressed,
                "tokens": layer.get_seq_length(),
                "slots": accounting.held(layer),
                "exact_heads": accounting.exact_heads(layer),
                "kv_bytes": accounting.layer_nbytes(layer),
                "exact_kv_bytes": accounting.exact_nbytes(layer),
            }
            for index, layer in enumerate(self.layers)
        ]
        if self.tolerance is not None:
            numbers = [i for i, layer in enumerate(self.layers) if isinstance(layer, SketchLayer)]
            for number, index in enumerate(numbers):
                above = self._planner.above.get(number)
                heads = [] if above is None else above.nonzero().flatten().tolist()
                layers[index]["above_tolerance"] = heads
        held = [accounting.held(layer) for layer in self._sketches()]
        return {
            "method": self.method,
            "budget": None if self.budget is None else self.budget.value,
            "tolerance": self.tolerance,
            "bits": self.bits,
            "tokens": self.get_seq_length(),
            "slots": sum(held) / len(held),
            "kv_bytes": self.nbytes(),
            "exact_kv_bytes": self.exact_nbytes(),
            "peak_kv_bytes": max(self.peak_nbytes, self.nbytes()),
            "layers": layers,
        }

    def error(self) -> list[dict[str, Any]]:
        """Measured relative error |z - exact| / |exact| of every compressible layer and KV head,
        over up to 32 of the prompt's last queries; the largest of the batch rows.

        ``prompt``: right after the prompt was compressed (its queries asked again; a query-aware
        method has seen them, so what follows may fare worse). ``now`` (with ``track_error``): over
        all tokens seen since, as if the same queries were asked now. 0 for what is not compressed;
        None where a head was compressed but nothing could be measured: compressed first while
        decoding.
        """
        rows = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SketchLayer):
                sketch = layer.sketch
                rows.append(
                    {
                        "layer": index,
                        "prompt": accounting.errors(sketch, sketch.error),
                        "now": accounting.errors(sketch, sketch.running_error),
                    }
                )
        return rows

    def reset(self) -> None:
        """Forget everything; settings stay."""
        for index in range(len(self.layers)):
            self._reset_layer(index)

    def _reset_layer(self, index: int) -> None:
        layer = self.layers[index]
        if isinstance(layer, SketchLayer):
            layer.reset()
        else:  # transformers 5.16 zeroes such a layer in place and keeps its length
            self.layers[index] = DynamicCache(config=self._config).layers[index]

    def _undo_forward(self, failed: int) -> None:
        """Take a forward that failed in layer ``failed`` back out of the layers before it. What was
        compressed cannot be undone; such a cache needs ``reset()``."""
        before = self.layers[failed].get_seq_length()
        for index, layer in enumerate(self.layers[:failed]):
            extra = layer.get_seq_length() - before
            if extra > 0 and before == 0:
                self._reset_layer(index)
            elif extra > 0 and isinstance(layer, SketchLayer) and not layer.sketch.compressed:
                layer.crop(-extra)

    def _sketches(self) -> list[SketchLayer]:
        return [layer for layer in self.layers if isinstance(layer, SketchLayer)]

    def _note_bytes(self) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes())


def _check_replaceable(config: PretrainedConfig) -> None:
    if isinstance(config, mpt.MptConfig):
        return  # has no attention interface, but an adapter of ours
    kernel = config._attn_implementation or "eager"
    if kernel.removeprefix(PREFIX) not in ("eager", "sdpa"):
        raise UnsupportedError(
            f"attn_implementation={kernel!r} cannot be wrapped yet; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model = model[0] if isinstance(model, (list, tuple)) else model
    if model is not None and not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"{model.__name__} does not use transformers' attention interface, so its attention "
            "cannot be replaced; use DynamicCache for it"
        )


def _max_positions(config: PretrainedConfig) -> int | None:
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def grouped(
    budgets: Sequence[Budget], driver: Callable[[Budget, int], Periodic]
) -> Periodic | HeadGroups:
    """One driver for a layer, or one per group of KV heads with the same budget."""
    distinct = list(dict.fromkeys(budgets))
    if len(distinct) == 1:
        return driver(distinct[0], 0)
    members = [[h for h, b in enumerate(budgets) if b == budget] for budget in distinct]
    drivers = [driver(budget, number) for number, budget in enumerate(distinct)]
    return HeadGroups(list(zip(members, drivers, strict=True)))


def _kv_heads(config: PretrainedConfig) -> int:
    for name in ("num_key_value_heads", "num_attention_heads", "n_heads"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedError(f"{type(config).__name__} does not say how many KV heads it has")
