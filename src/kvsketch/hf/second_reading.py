"""A second reading: what ``prefill`` reads again, the attention of a layer meanwhile, and the end
of that forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.estimator import attend
from kvsketch.hf.layer import SketchLayer
from kvsketch.observed import Observed, causal
from kvsketch.reread import attend_again, fits, looked_at
from kvsketch.slots import Slots

Usual = Callable[[Any], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Again:
    """A part of a second reading.

    Attributes:
        about: the tokens that are read again, in order: a slice, or int64 indices.
        kept: number of queries to keep.
        local: attend only to these tokens, the first four and the part itself.
        unmasked: there is no padding and the kernel is torch's, so the model need not create a mask
            over the tokens of the first reading.
        stops: a forward may stop after the last layer's queries (``ReadEnough``).
    """

    about: slice | Tensor
    kept: int = 0
    local: bool = False
    unmasked: bool = False
    stops: bool = False


@dataclass
class Reading:
    """A context that ``prefill`` reads before it is compressed.

    Attributes:
        first_counts: whether the queries of the first reading count.
        echoed: after so many tokens they are asked again, in the place of a sample's; 0: never.
        again: the part that is read a second time now; None: this is the first reading.
        weights: weights of the queries of an attention module, ``[batch, q]``; None: all equal.
        later: queries whose weights are not known yet, with their layers; None: they are known.
    """

    first_counts: bool
    echoed: int = 0
    again: Again | None = None
    weights: Mapping[nn.Module, Tensor] | None = None
    later: list[tuple[SketchLayer, Observed]] | None = None

    def ask(self, layer: SketchLayer, observed: Observed) -> None:
        """The queries of a layer in a second reading."""
        if self.later is not None:
            self.later.append((layer, observed))
            return
        if self.weights is not None:
            module = None if layer.module is None else layer.module()
            assert module is not None
            weights = self.weights[module].to(observed.queries.device)
            observed = replace(observed, weights=weights)
        assert self.again is not None
        layer.stream.ask(observed, self.again.about, self.again.kept)


class ReadEnough(Exception):
    """Every layer has seen a part's queries: the rest of the forward is not needed."""


def attention(
    layer: SketchLayer,
    again: Again,
    name: str,
    asked: Observed,
    plain: bool,
    mask: Any,
    usual: Usual,
    from_slots: Callable[[Tensor], Tensor],
    last: bool,
) -> tuple[Tensor, Tensor | None, Observed]:
    """Attention of a part of a second reading over an uncompressed layer.

    Args:
        layer: whose newest tokens are the part.
        again: what is read again.
        name: of the kernel the model requested; in the place of torch's own, faster ones will do.
        asked: the queries of the part.
        plain: whether the model's mask is a causal one.
        mask: it, over all tokens, or None (see ``widened``).
        usual: the model's kernel over all tokens, of a mask.
        from_slots: what the layer makes of an output of attention over its slots.
        last: whether the forward ends with this layer.

    Returns:
        ``[batch, q, num_attention_heads, value_dim]``, the kernel's weights where it ran, and the
        queries with what the kernel has found out about them.
    """
    stream, q = layer.stream, asked.queries.shape[2]
    slots, about = Slots(*stream.parted.tokens), again.about
    # Full attention is computed only because later layers need its output.
    everything = not again.local and not (again.stops and last)
    alone = layer.settings.readers == 1
    simple = plain and alone and not stream.padded and not torch.is_grad_enabled()
    if name == "sdpa" and simple and fits(asked, slots):
        out, total = attend_again(asked, slots, about, everything)
        return from_slots(out).transpose(1, 2).contiguous(), None, replace(asked, total=total)
    if again.local:
        near = Slots.cat(looked_at(stream.slots, about, q))
        sees = causal(q, near.count, asked.queries.device)
        out = attend(
            asked.queries,
            near,
            scaling=asked.scaling,
            softcap=asked.softcap,
            mask=sees,
            sinks=asked.sinks,
        )
        return from_slots(out).transpose(1, 2).contiguous(), None, asked
    if mask is None and again.unmasked and name == "sdpa":
        mask = causal(q, slots.count, asked.queries.device)
    return *usual(mask), asked


def widened(mask: Any, seen: int) -> Any:
    """A mask that a model has made over the newest tokens alone (``SketchCache.get_mask_sizes``),
    as one over all ``seen`` tokens: those before are visible. None stays None: a causal mask."""
    if not isinstance(mask, Tensor) or mask.shape[-1] == seen:
        return mask
    shape = (*mask.shape[:-1], seen - mask.shape[-1])
    boolean = mask.dtype == torch.bool
    earlier = mask.new_ones(shape) if boolean else mask.new_zeros(shape)
    return torch.cat([earlier, mask], dim=-1)
