"""The size of a cache, and how it is made."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache

from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import EXACT, Setup
from kvsketch.hf import SketchCache
from kvsketch.hf.accounting import layer_nbytes

#: the size of a cache, for the whole batch: slots, and bytes of live tensors by name
Footprint = dict[str, float]


def costs(after: Footprint, final: Footprint, rows: int = 1) -> dict[str, Any]:
    """A ``Reply``'s bytes, of one of ``rows`` cases that were answered together."""
    return {
        "slots": float(after["slots"]),
        "kv_bytes": after["kv_bytes"] / rows,
        "exact_kv_bytes": after["exact_kv_bytes"] / rows,
        "final_kv_bytes": final["kv_bytes"] / rows,
        "final_exact_kv_bytes": final["exact_kv_bytes"] / rows,
        "peak_kv_bytes": max(after["peak_kv_bytes"], final["peak_kv_bytes"]) / rows,
    }


def footprint(cache: SketchCache | DynamicCache) -> Footprint:
    """Measures `cache`. The exact size of an exact cache is its own."""
    if isinstance(cache, SketchCache):
        return cache.summary()
    size = sum(layer_nbytes(layer) for layer in cache.layers)
    names = ("kv_bytes", "exact_kv_bytes", "peak_kv_bytes")
    return {"slots": cache.get_seq_length(), **dict.fromkeys(names, size)}


def new_cache(
    config: Any, settings: Settings, setup: Setup, prompt_length: int
) -> SketchCache | DynamicCache:
    """An empty cache for a model with `config`; "exact" is transformers' own.

    Raises `KVSketchError` if the method, the budget or the model do not allow it.
    """
    if setup.method == EXACT:
        return DynamicCache(config=config)
    sink, recent = setup.window_of(settings.sink, settings.recent, prompt_length)
    chunked = settings.prefill == "exact" and settings.prefill_chunk_size is not None
    return SketchCache(
        config,
        setup.method,
        **setup.goal(),
        sink=sink,
        recent=recent,
        # A cache cannot know by itself that more chunks are to come.
        prefill=prompt_length if chunked else settings.prefill,
        keep=["decoded"] if settings.one_shot else [],
        seed=setup.seed,
    )


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
