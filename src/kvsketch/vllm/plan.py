"""How many requests fit into the memory of a GPU, with vLLM's own cache and with compressed pages,
from the configuration of a model alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.models import has_latents, kv_heads_of, layers_of, max_positions
from kvsketch.vllm.settings import PageSettings

#: The share of a GPU's memory that vLLM 0.32 and 0.33 use by default (``gpu_memory_utilization``).
UTILIZATION = 0.92
#: tokens in one of vLLM's blocks on CUDA, of which pages are made beside layers with a window
_BLOCK = 16
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Capacity:
    """The number of requests that fit.

    Attributes:
        weight_bytes: bytes of the model's weights.
        kv_bytes: bytes that are left for caches.
        request_bytes: bytes of a request of the longest context in vLLM's own cache.
        before: such requests that fit at once.
        before_fp8: the same with vLLM's own cache in FP8, one byte per number.
        budget: slots per KV head after a compression.
        slots: slots of a page.
        page_bytes: bytes of a request of any length with pages, in all layers.
        after: requests that fit at once with pages.
        sliding: layers with a sliding window, which keep vLLM's own cache of the window.
    """

    weight_bytes: int
    kv_bytes: int
    request_bytes: int
    before: float
    before_fp8: float
    budget: int
    slots: int
    page_bytes: int
    after: int
    sliding: int

    @property
    def warning(self) -> str | None:
        """A sentence, if vLLM serves more requests at once without kvsketch."""
        for fit, name in (
            (int(self.before), "vLLM's own cache"),
            (int(self.before_fp8), "vLLM's own cache in FP8 (--kv-cache-dtype fp8)"),
        ):
            if self.after < fit:
                return (
                    f"Fewer requests fit with kvsketch than with {name}: {self.after:,} against "
                    f"{fit:,}. Use that instead, or a smaller budget."
                )
        return None


def tokens_of(text: str, name: str) -> int:
    """A number of tokens, such as 4096 or 128k (131,072, as in the names of contexts).

    Raises:
        InputError: ``text`` is neither.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{name}={text!r} must be a number of tokens like 128k or 4096")
    return int(float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()])


def size_of(text: str, name: str) -> int:
    """A number of bytes with its unit, such as 80GiB or 24GB.

    Raises:
        InputError: ``text`` is not such a number.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{name}={text!r} must be a number of bytes like 80GiB or 24GB")
    if text.strip()[-1].isdigit():
        raise InputError(
            f"{name}={text!r} has no unit; write {text.strip()}GiB or {text.strip()}GB"
        )
    unit = (found[2] or "").upper()
    return int(float(found[1]) * (_BINARY.get(unit) or _UNITS[unit]))


def plan(
    config: Any,
    memory: int,
    context: int,
    concurrency: int | None = None,
    settings: PageSettings | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Capacity:
    """The budget with which ``concurrency`` requests fit, or the number of requests that fit with
    the given budget.

    Args:
        config: the config of a transformers model.
        memory: bytes of the GPU.
        context: the length of the longest context in tokens.
        concurrency: requests at once. None: ``settings`` has a budget.
        settings: method, sinks and recent window. Its budget is used if ``concurrency`` is None.
        dtype: of weights and caches.

    Raises:
        InputError: the numbers do not fit together, the context is longer than the model's
            positions, or the model does not fit into the memory.
        UnsupportedError: a model that the plugin does not serve.
    """
    settings = settings or PageSettings(budget=1024)
    most = _positions(config)
    if most is not None and context > most:
        raise InputError(
            f"context={context} is longer than the model's {most} positions "
            "(max_position_embeddings)"
        )
    text = config.get_text_config(decoder=True)
    full, windows = _layers(config)
    kv_heads, heads = kv_heads_of(config, 0), text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    weights = _parameters(config) * dtype.itemsize
    left = int(memory * UTILIZATION) - weights
    if left <= 0:
        raise InputError(
            f"the weights take {weights / 2**30:.1f} GiB of the {memory * UTILIZATION / 2**30:.1f} "
            "GiB that vLLM uses: no memory is left for caches"
        )
    token = kv_heads * 2 * head_dim * dtype.itemsize  # in one layer
    sliding = sum(min(window, context) for window in windows) * token
    request = full * context * token + sliding

    def page(budget: int) -> tuple[int, int]:
        """Slots of a page, and bytes of a request."""
        given = replace(settings, budget=budget)
        layout = given.layout(context, kv_heads, heads // kv_heads, head_dim, dtype)
        size = layout.bytes
        if windows:  # all layers have vLLM's blocks
            size = -(-size // (_BLOCK * token)) * _BLOCK * token
        return layout.average, full * size + sliding

    budget = settings.budget
    if concurrency is not None:
        if concurrency < 1:
            raise InputError(f"concurrency={concurrency} must be at least 1")
        low, high = settings.least, context
        if (concurrency + 1) * page(low)[1] > left:
            raise InputError(
                f"concurrency={concurrency}: not even budget={low} fits so often into the "
                f"{left / 2**30:.1f} GiB left for caches"
            )
        while low < high:  # the largest budget that fits, with one more page for vLLM's null block
            middle = (low + high + 1) // 2
            if (concurrency + 1) * page(middle)[1] <= left:
                low = middle
            else:
                high = middle - 1
        budget = low
    if not isinstance(budget, int):
        raise InputError(f"budget={budget!r} must be an int here: slots per KV head")
    slots, size = page(budget)
    before = left / request
    return Capacity(
        weights,
        left,
        request,
        before,
        before * dtype.itemsize,
        budget,
        slots,
        size,
        max(0, left // size - 1),
        len(windows),
    )


def _positions(config: Any) -> int | None:
    """The longest context that vLLM allows: also positions that YaRN adds."""
    most = max_positions(config)
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # of all layers, or by the kind of a layer
        if most is not None and isinstance(one, dict) and one.get("rope_type") == "yarn":
            most = max(most, int(one["original_max_position_embeddings"] * one["factor"]))
    return most


def _layers(config: Any) -> tuple[int, list[int]]:
    """The number of layers with full attention, and the windows of those with a sliding window.

    Raises:
        UnsupportedError: the plugin does not serve the model.
    """
    text = config.get_text_config(decoder=True)
    layers, chosen = layers_of(config)
    others = [layer for number, layer in enumerate(layers) if number not in chosen]
    each = getattr(text, "per_layer_config", None)
    sizes = ("head_dim", "num_key_value_heads", "num_attention_heads")
    shapes = {tuple(getattr(one, name, None) for name in sizes) for one in each or []}
    refused = {
        "latents instead of keys and values (multi-head latent attention)": has_latents(config),
        "layers that share keys and values": bool(getattr(text, "num_kv_shared_layers", None)),
        "ALiBi": text.model_type in ("bloom", "mpt") or bool(getattr(text, "alibi", False)),
        "chunked attention": "chunked_attention" in (getattr(text, "layer_types", None) or []),
        "layers without keys and values, or with states beside them": any(
            type(layer) is not DynamicSlidingWindowLayer for layer in others
        )
        or any(type(layers[number]) is not DynamicLayer for number in chosen),
    }
    for what, wrong in refused.items():
        if wrong:
            raise UnsupportedError(
                f"model_type={text.model_type!r} has {what}, which kvsketch does not serve with "
                "vLLM (docs/vllm.md)"
            )
    if len(shapes) > 1:
        raise UnsupportedError(
            f"model_type={text.model_type!r} has layers with heads of different sizes, which "
            "`kvsketch plan` does not calculate with"
        )
    return len(chosen), [layer.sliding_window for layer in others]


def _parameters(config: Any) -> int:
    """The number of weights of a model, which is made without allocating memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())
