"""Attention of a second reading, computed in pieces: the tokens before the part that is read again,
the tokens of that part, the tokens after it, and the tokens of the second reading itself.

Each piece is one call of a fused kernel that needs no mask other than the causal one, and returns
the log of its total. The scores of a part (KVzip, arXiv:2505.23416, section 3.2) are relative to
the total over some of the pieces, so that no second softmax is needed. The largest share of a token
is exp of the largest <q, k> - log total(q), which takes one matrix product and a maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.observed import Observed
from kvsketch.partial import partial, together
from kvsketch.pieces import at_once
from kvsketch.slots import Slots

#: Tokens at the start that every part of the second reading may attend to: kvpress's n_sink.
SINK = 4
# Scores of largest_share at a time, 4 MB in float32, and how many queries it takes at least.
_FEW_SCORES = 1 << 20
_FEW_QUERIES = 64


def looked_at(slots: Slots, about: slice | Tensor, q: int) -> list[Slots]:
    """The slots to which scores are relative: the first tokens (unless they are read again), the
    tokens that are read again, and the second reading.

    Args:
        slots: ``[batch, num_key_value_heads, n + q, ...]``. The last q are those of the second
            reading.
        about: the tokens that are read again, in order, as a slice or as int64 indices.
    """
    if isinstance(about, slice):
        start, again = about.start, slots.narrow(about.start, about.stop - about.start)
    else:
        start, again = int(about[0]), slots.map(lambda t: t.index_select(2, about))
    own = slots.narrow(slots.count - q, q)
    return [slots.narrow(0, min(SINK, start)), again, own]


def plain(asked: Observed, slots: Slots) -> bool:
    """Whether scores are scaled products alone, no query is padded, and all slots are exact
    tokens."""
    return asked.plain and asked.sinks is None and asked.live is None and slots.mass is None


def fits(asked: Observed, slots: Slots) -> bool:
    """Whether ``attend_again`` accepts these arguments: they are ``plain``, on the CPU."""
    return plain(asked, slots) and asked.queries.device.type == "cpu"


def attend_again(
    asked: Observed, slots: Slots, about: slice | Tensor, everything: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of a second reading, causal among the tokens of that reading.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]`` that ``fits`` accepts.
        slots: ``[batch, num_key_value_heads, n + q, ...]``. The last q are the queries' own tokens.
        about: as in ``looked_at``; it must be a slice if ``everything`` is true.
        everything: whether to attend to all slots. Else only to those of ``looked_at``.

    Returns:
        The output of attention ``[batch, num_attention_heads, q, value_dim]``, and the log of the
        total over ``looked_at``, float32 or float64 ``[batch, num_attention_heads, q]``.
    """
    queries = asked.queries
    batch, heads, q, dim = queries.shape
    kv_heads = slots.keys.shape[1]
    packed = queries.reshape(batch, kv_heads, -1, dim)

    def over(part: Slots) -> tuple[Tensor, Tensor]:
        out, total = partial(packed, part.keys, part.values, None, asked.scaling)
        return out.reshape(batch, heads, q, -1), total.reshape(batch, heads, q)

    *before, own = looked_at(slots, about, q)
    pieces = [over(part) for part in before if part.count]
    keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (own.keys, own.values))
    pieces.append(partial(queries, keys, values, None, asked.scaling, is_causal=True))
    out, total = together(pieces)
    if everything and isinstance(about, slice):
        first, n = min(SINK, about.start), slots.count - q
        spans = ((first, about.start), (about.stop, n))
        rest = [over(slots.narrow(a, b - a)) for a, b in spans if a < b]
        out = together([(out, total), *rest])[0]
    return out, total


def largest_share(asked: Observed, keys: Tensor, total: Tensor) -> Tensor:
    """The largest share of attention that any query and any query head of its group gives a key.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]``. Scores are scaled products
            alone.
        keys: ``[batch, num_key_value_heads, n, head_dim]``, of exact tokens.
        total: float ``[batch, num_attention_heads, q]``: the log of the total that shares refer to.

    Returns:
        ``[batch, num_key_value_heads, n]``, in the dtype of ``total``.
    """
    batch, kv_heads, n, dim = keys.shape
    rows = batch * kv_heads
    queries = asked.queries.reshape(rows, -1, dim).to(total.dtype) * asked.scaling
    less = total.reshape(rows, -1, 1)
    across = keys.reshape(rows, n, dim).to(total.dtype).mT
    found = torch.full((rows, n), -torch.inf, dtype=total.dtype, device=keys.device)
    few = max(_FEW_QUERIES, at_once(keys, _FEW_SCORES) // (rows * n))
    for start in range(0, queries.shape[1], few):
        some = slice(start, start + few)
        scores = torch.baddbmm(less[:, some], queries[:, some], across, beta=-1)
        torch.maximum(found, scores.amax(1), out=found)
    return found.exp_().view(batch, kv_heads, n)
