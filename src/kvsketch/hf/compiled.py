"""``torch.compile``: a compressed layer as one operation of a graph.

The contents of a layer change from token to token, so they cannot be part of a graph. But
everything from taking the new keys to returning the attention output can be one custom operation
that the graph calls. While a model is traced, ``SketchCache.update`` only records the layer, and
the kernel that the model then requests is ``kvsketch::attend``, which does at run time what happens
without a compiler.

This is for caches whose layers are all plain compressed ones; others break the graph at every
layer, with correct results.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvsketch.errors import UnsupportedError
from kvsketch.estimator import attend
from kvsketch.hf import interface
from kvsketch.hf.attention import OF_THE_FORWARD
from kvsketch.hf.rotary import home_of
from kvsketch.slots import Slots

# Live caches by number: a graph holds the number, not the cache.
_CACHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)
# While tracing: cache, layer and new keys of the update whose attention has not been traced yet.
_TRACED: list[tuple[int, int, Tensor]] = []


def number(cache: Any) -> int:
    """The number by which graphs find a ``SketchCache``."""
    interface.graphed = graph_attention
    found = next(_NUMBERS)
    _CACHES[found] = cache
    return found


def traced(cache: int, layer: int, keys: Tensor) -> None:
    """Record an update; called while tracing."""
    _TRACED[:] = [(cache, layer, keys)]


def graph_attention(kernel: Any, name: str) -> Any:
    """The kernel of the update just traced, or ``kernel`` if there was none."""
    if not _TRACED:
        return kernel
    cache, layer, keys = _TRACED.pop()

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        given = [n for n, v in kwargs.items() if not _says_nothing(n, v)]
        if given or module.training or key is not keys:
            raise UnsupportedError(
                f"a compiled graph cannot take {given or 'training mode or changed keys'}; run "
                "this model without torch.compile"
            )
        out = torch.ops.kvsketch.attend(
            query,
            key,
            value,
            attention_mask,
            cache,
            layer,
            name,
            *home_of(module),
            scaling,
            softcap,
            s_aux,
        )
        return out, None

    return attention


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a graph may omit an argument; see ``attention`` for those that it uses."""
    if value is None or (value is False and name != "is_causal"):
        return True
    if name in ("dropout", "is_causal"):
        return bool(value == (name == "is_causal"))
    return name in OF_THE_FORWARD and name != "output_attentions"


@torch.library.custom_op("kvsketch::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: int,
    layer: int,
    name: str,
    home: str,
    rotates: bool,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    held = _CACHES.get(cache)
    if held is None:
        raise UnsupportedError(
            "a compiled graph was called with a SketchCache that no longer exists"
        )
    # What waits for later tokens or layers must not lie in memory that the graph uses again.
    query, key, value = (tensor.clone() for tensor in (query, key, value))
    keys, values = held.take(key, value, layer)
    found = held.layers[layer]
    interface.close(found)  # its kernel will not be requested
    module = None if found.module is None else found.module()
    if module is None and found.stream.seen == found.pending:  # the first tokens
        found.note_positions(home, rotates)
    out, _ = held.attend(
        found,
        _kernel(module, name),
        name,
        module,
        query,
        keys,
        values,
        attention_mask,
        scaling=scaling,
        softcap=softcap,
        s_aux=s_aux,
    )
    answer: Tensor = out.contiguous()
    return answer


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, q, _dim = query.shape
    return query.new_empty(batch, q, heads, value.shape[3])


def _kernel(module: Any, name: str) -> Any:
    """The model's own kernel, once a forward outside a graph has shown the module; otherwise
    ours."""
    if module is None:
        return _reference
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface._global_mapping[name]


def _reference(
    module: None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Exact attention, if no kernel is known."""
    q, n = query.shape[2], key.shape[2]
    mask = torch.ones(q, n, dtype=torch.bool, device=query.device).tril(n - q)[None, None]
    if attention_mask is not None:
        boolean = attention_mask.dtype == torch.bool
        mask = attention_mask if boolean else attention_mask == 0
    out = attend(query, Slots(key, value), scaling=scaling, softcap=softcap, mask=mask, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None
