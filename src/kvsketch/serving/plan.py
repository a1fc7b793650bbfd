"""How many requests fit into a GPU's memory, before and after, by a model's configuration alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError, UnsupportedError
from .layout import Layout
from .settings import Settings
from .split_layout import SplitLayout

#: Of a GPU's memory, what vLLM 0.32 takes for itself unless told (``--gpu-memory-utilization``).
UTILIZATION = 0.92
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Plan:
    """What fits.

    Attributes:
        weight_bytes: of the model; kv_bytes: what is left for caches.
        token_bytes: of a token in vLLM's own cache, all layers.
        before: requests of the longest context that fit there at once.
        budget: slots per KV head that a compression leaves; slots: of a page.
        page_bytes: of a request, all layers, whatever its length.
        after: requests that fit.
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
    """A number of tokens: 4096, or 128k, which is 131,072 as models' contexts are named.

    Raises:
        InputError: neither.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{name}={text!r} must be a number of tokens like 128k or 4096")
    return int(float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()])


def size_of(text: str, name: str) -> int:
    """A number of bytes: 80GiB, 24GB.

    Raises:
        InputError: none of these.
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
    """The budget with which ``concurrency`` requests fit, or what fits with the given one.

    Args:
        config: of a transformers model.
        memory: bytes of the GPU.
        context: the longest, in tokens.
        concurrency: requests at once; None: ``settings`` has a budget.
        settings: method, sinks and recent window; its budget counts where ``concurrency`` is None.
        dtype: of weights and caches.

    Raises:
        InputError: numbers that do not fit together, or a model that does not fit.
        UnsupportedError: layers that are not full attention over keys and values.
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
        while low < high:  # the largest that fits; one page more is vLLM's null block
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
    """How many weights a model has: it is made without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())
