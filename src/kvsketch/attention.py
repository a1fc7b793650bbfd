"""attend_to: where the kernel is chosen for attention over what a layer holds, once.

    what is held        what is asked                               kernel
    ------------------  ------------------------------------------  ------------------------------
    a page              one query per head                          kernels.paged.decode
    a page              a chunk of new tokens, a causal mask        kernels.paged.prefill
    a page              any other mask; ALiBi over a chunk          slots.attend, the reference
    slots of a sketch   anything                                    slots.attend, the reference

The reference takes every argument (scaling, soft-cap, ALiBi slopes, sinks, a mask), and so do the
others, but for masks. On the CPU ``paged`` reads float32, float64, bfloat16 and float16 slots as
they are (torch's fused attention); on CUDA one query per head runs in ``triton_decode`` where
Triton is installed.
"""

from __future__ import annotations

from torch import Tensor

from .cache.page import Page
from .kernels import paged
from .slots import Observed, Slots, attend, causal


def attend_to(
    asked: Observed, held: Page | Slots, mask: Tensor | None = None, padded: bool = False
) -> Tensor:
    """Attention of the newest tokens over all a layer holds, themselves included.

    Args:
        asked: their queries ``[batch, num_attention_heads, q, head_dim]``, and what turns them into
            scores.
        held: a page, or slots ``[batch, num_key_value_heads, n, ...]``; the newest q tokens are the
            last q of every head.
        mask: bool, True where a query may look, over ``held`` as slots; None: a causal one.
        padded: whether slots may be dead that once were tokens.

    Returns:
        ``[batch, num_attention_heads, q, value_dim]`` in the dtype of the queries. A query that
        sees no mass gets zeros.
    """
    q = asked.queries.shape[2]
    if isinstance(held, Page) and mask is None:
        if q == 1:
            return paged.decode(asked, held, padded)
        if asked.slopes is None:
            return paged.prefill(asked, held, padded)
    if mask is None and q > 1:
        mask = causal(q, held.count, asked.queries.device)
    slots = held if isinstance(held, Slots) else held.slots
    return attend(
        asked.queries,
        slots,
        scaling=asked.scaling,
        softcap=asked.softcap,
        mask=mask,
        slopes=asked.slopes,
        sinks=asked.sinks,
    )
