"""attend_to: chooses the kernel for attention over the contents of a layer.

    what is held        what is asked                               kernel
    ------------------  ------------------------------------------  ------------------------------
    parts of a page     one query per head                          kernels.paged.decode
    parts of a page     a chunk of new tokens                       kernels.paged.prefill
    parts of a page     queries after all slots                     kernels.paged.decode
    parts of a page     ALiBi over a chunk                          estimator.attend, the reference
    slots               anything, a mask                            estimator.attend, the reference
    rows of pages       tokens of many requests of an engine        kernels.rows.attend

A page has one part, or two: slots in 8 or 4 bits, and the others. The reference takes every
argument (scaling, soft-cap, ALiBi slopes, sinks, a mask), and so do the others, except masks. On
the CPU ``paged`` reads float32, float64, bfloat16 and float16 slots without conversion (torch's
fused attention) and slots in 8 or 4 bits in small pieces; on CUDA one query per head runs in
``triton_decode`` if Triton is installed, which reads both.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvsketch.estimator import attend
from kvsketch.kernels import paged
from kvsketch.kernels import rows as rows_of_pages
from kvsketch.observed import Observed, causal
from kvsketch.page.part import Part
from kvsketch.page.rows import Rows
from kvsketch.slots import Slots


def attend_to(
    asked: Observed,
    held: Sequence[Part] | Slots,
    mask: Tensor | None = None,
    padded: bool = False,
    rows: Rows | None = None,
    new: Part | None = None,
) -> Tensor:
    """Attention of the newest tokens over everything in a layer, including themselves.

    Args:
        asked: their queries ``[batch, num_attention_heads, q, head_dim]``, with scaling, soft-cap
            and the other settings of attention. Queries ``after`` all slots attend to every one.
        held: the parts of a page, of which the last ends with the newest q tokens of every head; or
            slots ``[batch, num_key_value_heads, n, ...]``, whose last q they are.
        mask: bool, True where a query may attend, over slots; None: a causal mask, or none for
            queries ``after`` all slots.
        padded: whether there may be dead slots that were padding tokens.
        rows: the parts are those of all pages of an engine, and these rows are read; None: all.
        new: with ``rows``, the tokens of the queries, if the pages do not hold them yet.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries. A query that
        sees no mass gets zeros.
    """
    q = asked.queries.shape[2]
    if not isinstance(held, Slots):
        assert mask is None
        if rows is not None:
            return rows_of_pages.attend(asked, held, rows, new)
        if q == 1:
            return paged.decode(asked, held, padded)
        if asked.after:
            return _after(asked, held, padded)
        if asked.slopes is None:
            return paged.prefill(asked, held, padded)
        held = Slots.cat([part.slots for part in held])
    if mask is None and q > 1 and not asked.after:
        mask = causal(q, held.count, asked.queries.device)
    return attend(
        asked.queries,
        held,
        scaling=asked.scaling,
        softcap=asked.softcap,
        mask=mask,
        slopes=asked.slopes,
        sinks=asked.sinks,
    )


def _after(asked: Observed, parts: Sequence[Part], padded: bool) -> Tensor:
    """Attention of several queries after all slots: as if each were one of another head."""
    batch, heads, q, dim = asked.queries.shape
    queries = asked.queries.reshape(batch, heads * q, 1, dim)
    sinks, slopes = (
        None if x is None else x.repeat_interleave(q) for x in (asked.sinks, asked.slopes)
    )
    folded = Observed(queries, asked.scaling, asked.softcap, slopes, sinks=sinks, after=True)
    return paged.decode(folded, parts, padded).view(batch, heads, q, -1)
