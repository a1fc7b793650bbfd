"""How many requests fit into the memory of a GPU, with vLLM's own cache and with compressed pages,
from the configuration of a model alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError, UnsupportedError
from .layout import Layout
from .settings import Settings
from .split_layout import SplitLayout

#: The share of a GPU's memory that vLLM 0.32 uses by default (``--gpu-memory-utilization``).
UTILIZATION = 0.92
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Plan:
    """The number of requests that fit.

    Attributes:
        weight_bytes: bytes of the model's weights.
        kv_bytes: bytes that are left for caches.
        token_bytes: bytes of a token in vLLM's own cache, in all layers.
        before: requests of the longest context that fit into vLLM's own cache at once.
        budget: slots per KV head after a compression.
        slots: slots of a page.
        page_bytes: bytes of a request of any length, in all layers.
        after: requests that fit at once with compressed pages.
    """

    weight_bytes: int
    kv_bytes: int
    token_bytes: int
    before: float
    budget: int
    slots: int
    page_bytes: int
    after: int


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
    """A number of bytes, such as 80GiB or 24GB.

    Raises:
        InputError: ``text`` is not a number of bytes.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{name}={text!r} must be a number of bytes like 80GiB or 24GB")
    unit = (found[2] or "").upper()
    return int(float(found[1]) * (_BINARY.get(unit) or _UNITS[unit]))


def plan(
    config: Any,
    memory: int,
    context: int,
    concurrency: int | None = None,
    settings: Settings | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Plan:
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
        InputError: the numbers do not fit together, or the model does not fit into the memory.
        UnsupportedError: a layer is not full attention over keys and values.
    """
    settings = settings or Settings(budget=1024)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"model_type={text.model_type!r}: only models whose layers are all full attention over "
            "keys and values can be planned for"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = text.num_hidden_layers
    weights = _parameters(config) * dtype.itemsize
    left = int(memory * UTILIZATION) - weights
    if left <= 0:
        raise InputError(
            f"the weights take {weights / 2**30:.1f} GiB of the {memory * UTILIZATION / 2**30:.1f} "
            "GiB that vLLM uses: no memory is left for caches"
        )
    token = layers * kv_heads * 2 * head_dim * dtype.itemsize

    def page(budget: int) -> tuple[Layout | SplitLayout, int]:
        given = replace(settings, budget=budget)
        layout = given.layout(context, kv_heads, heads // kv_heads, head_dim, dtype)
        return layout, layout.bytes * layers

    budget = settings.budget
    if concurrency is not None:
        if concurrency < 1:
            raise InputError(f"concurrency={concurrency} must be at least 1")
        low, high = settings.sink + settings.recent + 1, context
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
    layout, size = page(budget)
    before = left / (context * token)
    return Plan(weights, left, token, before, budget, layout.slots, size, max(0, left // size - 1))


def _parameters(config: Any) -> int:
    """The number of weights of a model, which is made without allocating memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())
