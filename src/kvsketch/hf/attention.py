"""The attention function registered with transformers, under a name of ours.

``kvsketch_<kernel>`` (``kvsketch_sdpa``, ``kvsketch_eager``, ...) runs the model's usual kernel
while a layer is uncompressed, attends to slots afterwards, and then lets the layer compress.
Keys that do not come from a SketchCache go straight to the usual kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import attend_one
from ..slots import Observed, Slots, attend, causal
from ..streaming.head_groups import HeadGroups

if TYPE_CHECKING:
    from .layer import SketchLayer

PREFIX = "kvsketch_"
_TAG = "_kvsketch_layer"
_FULL_PRECISION = (torch.float32, torch.float64)

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def register(kernel: str) -> str:
    """Register our attention function around ``kernel`` and return its name."""
    if kernel.startswith(PREFIX):
        return kernel
    name = PREFIX + kernel
    if name not in ALL_ATTENTION_FUNCTIONS:

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return _attention(usual_kernel(module, kernel), module, *args, **kwargs)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
    return name


def tag(keys: Tensor, layer: SketchLayer) -> Tensor:
    """A view of ``keys`` that tells the attention function which layer they come from."""
    view = keys.view_as(keys)
    setattr(view, _TAG, layer)
    return view


def layer_of(keys: Tensor) -> SketchLayer | None:
    """The layer that returned ``keys``, or None."""
    layer: SketchLayer | None = getattr(keys, _TAG, None)
    return layer


def live_tail(mask: Tensor | None, num_queries: int) -> Tensor | None:
    """Which of the newest tokens are real, bool ``[batch, q]``, read off the causal mask: its last
    row sees every real token. None when there is no padding to know of."""
    if mask is None or num_queries == 1:
        return None
    last = mask[:, 0, -1, -num_queries:]
    live = last if last.dtype == torch.bool else last == 0
    return None if bool(live.all()) else live


def usual_kernel(module: nn.Module, kernel: str) -> Kernel:
    """transformers' attention function of that name for a model's module."""
    if kernel != "eager":
        found: Kernel = ALL_ATTENTION_FUNCTIONS[kernel]
        return found
    home = sys.modules[type(module).__module__]
    eager: Kernel = home.eager_attention_forward  # every model file has its own
    return eager


def _attention(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    layer = layer_of(key)
    if softcap is not None:
        kwargs["softcap"] = softcap
    if layer is None:
        return kernel(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    sketch = layer.sketch
    q = query.shape[2]
    live = live_tail(attention_mask, q)
    if live is not None:
        sketch.mark_padding(live)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    method = sketch.compressor
    observed = Observed(query, scale, softcap, live=live) if sketch.wants_queries(q) else None
    lean = q == 1 and softcap is None and query.dtype in _FULL_PRECISION
    lean = lean and not (sketch.padded or method.split_sums)
    if isinstance(sketch, HeadGroups) and sketch.compressed:
        out = attend_groups(query, sketch, scale, softcap, lean)
        layer.after_attention(observed)
        return out.transpose(1, 2).contiguous(), None
    slots, weights = sketch.slots, None
    score = slots.score if method.accumulates else None
    if not sketch.compressed:
        out, weights = kernel(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    elif lean and (slots.mass is not None or score is not None):
        out = attend_one(query, slots, scaling=scale, score=score).transpose(1, 2).contiguous()
        observed = None if score is not None else observed
    elif q == 1 and slots.mass is None:
        # One query over exact tokens, all visible: the usual kernel does it, without a mask.
        out, weights = kernel(module, query, key, value, None, scaling=scaling, **kwargs)
    else:
        out = attend_chunk(query, slots, scale, softcap).transpose(1, 2).contiguous()
    layer.after_attention(observed)
    return out, weights


def attend_groups(
    query: Tensor,
    sketch: HeadGroups,
    scaling: float,
    softcap: float | None = None,
    lean: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens where groups of heads hold different numbers of slots.

    Args:
        lean: one query, no padding, full precision: the short kernel will do.
    """
    pairs = list(zip(sketch.split(query), sketch.drivers, strict=True))
    if lean:
        return sketch.assemble([attend_one(q, d.slots, scaling=scaling) for q, d in pairs])
    biases: Sequence[Tensor | None] = [None] * len(pairs)
    if slopes is not None:
        biases = [part[0] for part in sketch.split(slopes[None])]
    return sketch.assemble(
        [
            attend_chunk(q, driver.visible, scaling, softcap, bias)
            for (q, driver), bias in zip(pairs, biases, strict=True)
        ]
    )


def attend_chunk(
    query: Tensor,
    slots: Slots,
    scaling: float,
    softcap: float | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """The newest tokens' attention over slots and, causally, over their own chunk."""
    q = query.shape[2]
    mask = causal(q, slots.count, query.device) if q > 1 else None
    return attend(query, slots, scaling=scaling, softcap=softcap, mask=mask, slopes=slopes)
