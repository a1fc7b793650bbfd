"""Attention of one query per head over the parts of a page, by the Triton kernels.

Every part is one launch, whatever the sizes of its heads, and a last one combines all pieces. What
a launch needs to know of a part is made once and kept with the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsketch.kernels.flat_page import check
from kvsketch.kernels.triton_arguments import KernelScores, flat
from kvsketch.kernels.triton_decode import combined
from kvsketch.kernels.triton_pieces import Pieces, scratch_for, splits_for
from kvsketch.observed import Observed
from kvsketch.page.part import Part


class PreparedLaunches:
    """``attend`` of queries like the first ones, over parts whose tensors stay and whose last one
    grows. What does not change is made once: a token's time is that of Python and of the launches.

    Args:
        asked: queries ``[batch, num_attention_heads, 1, head_dim]``.
        parts: the slots.
    """

    def __init__(self, asked: Observed, parts: Sequence[Part]) -> None:
        queries = asked.queries
        launches = [_pieces(part, asked) for part in parts]
        splits = sum(pieces.splits for pieces, _ in launches)
        dim = launches[0][1]
        self._like = queries.dtype, asked.scaling, asked.softcap
        self._shape = *queries.shape[:3], dim
        self._logs = torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device)
        self._parts: tuple[Tensor, Tensor] | None = None
        self._launches: list[tuple[Pieces, Tensor | None, Tensor]] = []
        if splits == 1:
            self._launches = [(launches[0][0], None, self._logs)]
            return
        self._parts = every, totals = scratch_for(queries, dim, splits)
        first = 0
        for pieces, _ in launches:
            mine = slice(first, first + pieces.splits)
            self._launches.append((pieces, every[:, :, mine], totals[:, :, mine]))
            first += pieces.splits

    def attend(self, asked: Observed) -> Tensor | None:
        """The attention; None: these queries are not like the first ones."""
        like = asked.queries.dtype, asked.scaling, asked.softcap
        if asked.queries.shape[:3] != self._shape[:3] or like != self._like:
            return None
        return None if asked.sinks is not None else self.found(asked.queries)[0]

    def found(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """As ``attend``. The logs are overwritten by the next call."""
        out = queries.new_empty(self._shape)
        for pieces, into, logs in self._launches:
            pieces(queries, None, out if into is None else into, logs, into is None)
        if self._parts is not None:
            combined(*self._parts, out, self._logs)
        return out, self._logs


def attend(asked: Observed, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Attention over all parts together, without attention sinks and ALiBi.

    Args:
        asked: queries ``[batch, num_attention_heads, 1, head_dim]``.
        parts: the slots.

    Returns:
        ``[batch, num_attention_heads, 1, value_dim]`` in the dtype of the queries, and the logs of
        the summed weights, float32 ``[batch, num_attention_heads, 1]``.
    """
    return PreparedLaunches(asked, parts).found(asked.queries)


def flat_of(part: Part) -> dict[str, Any]:
    """The fields of a part, ``[batch, total, ...]``. Quantised keys and values stay quantised."""
    even = part.blocks is None
    found: dict[str, Any] = {n: t.flatten(1, 2) if even else t for n, t in part.fields.items()}
    for name, few in part.packed.items():
        found[name] = few.map_slots(lambda t: t.flatten(1, 2)) if even else few
    return found


def _pieces(part: Part, asked: Observed) -> tuple[Pieces, int]:
    """The launch over a part, and the channels of a value; made anew where the part has other
    tensors or the queries another shape."""
    start, count = part.spans()
    contents = [*part.fields.values(), *part.packed.values(), start, count]
    queries, scores = asked.queries, (asked.scaling, asked.softcap)
    # With gradients, which the kernels have not, what was checked before is checked again.
    grad = queries.requires_grad and torch.is_grad_enabled()
    like = queries.shape, queries.dtype, scores, grad
    known = part.for_kernel
    if known is not None and len(known[0]) == 2:  # and not what the CPU's kernel keeps
        (held, before), found = known
        same = len(held) == len(contents) and all(map(_is, held, contents))
        if same and before == like:
            made: tuple[Pieces, int] = found
            return made
    fields = flat_of(part)
    given = (fields["keys"], fields["values"], fields.get("log_mass"), start, count)
    extras: dict[str, Any] = dict.fromkeys(("sinks", "slopes", "positions"))
    sizes = check(queries, *given, scaling=scores[0], softcap=scores[1], **extras)
    most = min(part.count + part.room, sizes.total)
    page = flat(*given[:3], None, start, count)
    pieces = Pieces(
        page,
        KernelScores(float(asked.scaling), asked.softcap, None, (0,), None, (0,)),
        sizes,
        queries.element_size(),
        most,
        splits_for(sizes.batch, sizes.kv_heads, most),
    )
    part.for_kernel = (contents, like), (pieces, sizes.value_dim)
    return pieces, sizes.value_dim


def _is(a: object, b: object) -> bool:
    return a is b
