"""measure_heads: how far back the heads of a model attend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.cache.retrieval_heads import RetrievalHeads
from kvsketch.errors import InputError, UnsupportedError, at_least
from kvsketch.hf import models

#: the function of a model's file that rotates queries and keys to their positions
_ROTARY = "apply_rotary_pos_emb"


def measure_heads(
    model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], *, positions: int = 500
) -> RetrievalHeads:
    """Scores that distinguish retrieval heads from streaming heads, measured on texts.

    DuoAttention (arXiv:2410.10819) trains such scores on passkeys in long texts and has published
    those of a few models (``RetrievalHeads`` accepts them). The scores of this function are
    measured, without training, by the rule of kvpress's
    ``DuoAttentionPress(on_the_fly_scoring=True)``: the mean query and the mean key of a text before
    RoPE are placed at every one of ``positions`` positions. A head's score is the area under the
    cumulated attention of the last query, from the first position on, averaged over the query heads
    of its KV head and over texts. A score near 1 means that the head attends far back for any text.

    It runs one forward per text and does not change the model. Scores hardly depend on the text:
    measure once for a model and keep ``scores``.

    Args:
        model: a transformers causal language model with rotary positions.
        tokenizer: the model's tokenizer.
        texts: a few dozen texts of any kind, each of at least ``positions`` tokens.
        positions: number of positions of the mean query and key, >= 2.

    Raises:
        InputError: no text, a text that is too short, or ``positions`` out of range.
        UnsupportedError: queries and keys cannot be read before RoPE.

    Example:
        >>> heads = kvsketch.measure_heads(model, tokenizer, texts)          # doctest: +SKIP
        >>> cache = SketchCache(                                             # doctest: +SKIP
        ...     model.config, allocation=heads, budget=0.5, sink=128, recent=256
        ... )
    """
    at_least("positions", positions, 2)
    config = model.config
    models.check_supported(config)
    if models.has_latents(config):
        raise _unsupported(model, "it caches latents, whose scores have two parts")
    if isinstance(texts, str) or not texts:
        raise InputError("texts must be a list of strings, at least one")
    read = [tokenizer(text, return_tensors="pt")["input_ids"].to(model.device) for text in texts]
    for number, ids in enumerate(read):
        if ids.shape[1] < positions:
            raise InputError(
                f"texts[{number}] has {ids.shape[1]} tokens and must have at least "
                f"positions={positions}"
            )
    _, layers = models.layers_of(config)
    heads = models.kv_heads_of(config, layers[0])
    total = torch.zeros(len(layers), heads, dtype=torch.float32, device="cpu")
    for ids in read:
        with _watching(model, heads, positions) as found, torch.no_grad():
            model.base_model(input_ids=ids, use_cache=False)
        for place, layer in enumerate(layers):
            if len(found.get(layer, ())) != 1:
                raise _unsupported(model, f"layer {layer} does not rotate all of them by {_ROTARY}")
            total[place] += found[layer][0] / len(read)
    return RetrievalHeads(total)


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"measure_heads cannot read queries and keys before RoPE in {type(model).__name__}: "
        f"{reason}; pass your own scores to RetrievalHeads"
    )


@contextmanager
def _watching(model: nn.Module, heads: int, positions: int) -> Iterator[dict[int, list[Tensor]]]:
    """While the model reads one row: the scores, ``[heads]``, of every call that turns all queries
    and keys of a layer, by layer."""
    found: dict[int, list[Tensor]] = {}
    runs: list[nn.Module] = []  # the layer that runs, and its attention
    inside = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    files = {sys.modules[type(m).__module__] for m in inside}
    before = {file: getattr(file, _ROTARY) for file in files if hasattr(file, _ROTARY)}

    def watched(rotate: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = runs[-1]
        whole = isinstance(k, Tensor) and k.dim() == 4 and k.shape[:2] == (1, heads)
        if whole and k.shape[3] == getattr(module, "head_dim", k.shape[3]):
            turned = functools.partial(rotate, **kwargs)
            score = _score(module, turned, q, k, args, positions)
            found.setdefault(getattr(module, "layer_idx", -1), []).append(score)
        return rotate(q, k, *args, **kwargs)

    hooks = [m.register_forward_pre_hook(lambda m, _: runs.append(m)) for m in inside]
    try:
        for file, rotate in before.items():
            setattr(file, _ROTARY, functools.partial(watched, rotate))
        yield found
    finally:
        for file, rotate in before.items():
            setattr(file, _ROTARY, rotate)
        for hook in hooks:
            hook.remove()


def _score(
    module: nn.Module, rotate: Any, q: Tensor, k: Tensor, args: Sequence[Any], positions: int
) -> Tensor:
    """The area under the cumulated attention, float32 ``[num_key_value_heads]``, of queries and
    keys ``[1, heads, n, head_dim]`` before RoPE."""
    spread = [
        x.float().mean(2, keepdim=True).to(x.dtype).expand(-1, -1, positions, -1) for x in (q, k)
    ]
    cos, sin, *others = args
    q, k = rotate(*spread, cos[..., :positions, :], sin[..., :positions, :], *others)
    scaling = getattr(module, "scaling", None) or q.shape[3] ** -0.5
    last = q[0, :, -1].float().view(k.shape[1], -1, q.shape[3])  # [heads, group, head_dim]
    attention: Tensor = (last @ k[0].float().mT * scaling).softmax(-1)
    return attention.cumsum(-1).mean((1, 2)).cpu()
