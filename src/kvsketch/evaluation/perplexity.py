"""Perplexity of a text whose beginning a cache holds compressed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kvsketch.errors import InputError, at_least

_EXACT_CHUNK = 512  # tokens; bounds the logits of the exact run


@dataclass(frozen=True)
class Perplexity:
    """Mean -log p, in nats per token, of the tokens scored: through the cache, and exactly."""

    nats: float
    exact_nats: float
    tokens: int

    @property
    def value(self) -> float:
        return math.exp(self.nats)

    @property
    def exact_value(self) -> float:
        return math.exp(self.exact_nats)


def perplexity(
    model: Any,
    ids: Tensor,
    make_cache: Callable[[], Cache],
    prefill: int,
    chunk: int = 1,
) -> Perplexity:
    """Read the first ``prefill`` tokens in one piece, then the others as they are, through the same
    cache. The first token after the prompt is predicted by the prompt itself and not scored.

    Args:
        model: a transformers causal language model.
        ids: ``[1, n]``, no padding; n above prefill + 1.
        make_cache: an empty cache, such as ``lambda: SketchCache(model.config, budget=0.25)``.
        prefill: tokens of the prompt.
        chunk: tokens fed at a time after it. 1 is what decoding does; more is faster, but a
            ``SketchCache`` takes a chunk for a prompt (it is seen whole, then compressed).

    Raises:
        InputError: ids of another shape or too short, a prefill or chunk below 1.
    """
    at_least("prefill", prefill, 1)
    at_least("chunk", chunk, 1)
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < prefill + 2:
        raise InputError(
            f"ids of shape {tuple(ids.shape)} must be [1, n] with n >= prefill + 2 = {prefill + 2}"
        )
    ids = ids.to(model.device)
    nats = _nats(model, ids, make_cache(), prefill, chunk)
    exact = _nats(model, ids, DynamicCache(config=model.config), prefill, _EXACT_CHUNK)
    return Perplexity(nats, exact, ids.shape[1] - prefill - 1)


def _nats(model: Any, ids: Tensor, cache: Cache, prefill: int, chunk: int) -> float:
    """Mean -log p of ``ids[0, prefill + 1:]``."""
    total, last = 0.0, ids.shape[1] - 1
    with torch.inference_mode():
        model(ids[:, :prefill], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for start in range(prefill, last, chunk):
            end = min(start + chunk, last)
            logits = model(ids[:, start:end], past_key_values=cache, use_cache=True).logits
            scores = logits[0].double().log_softmax(-1)
            right = ids[0, start + 1 : end + 1, None]
            total -= float(scores.gather(-1, right).sum())
    return total / (last - prefill)
