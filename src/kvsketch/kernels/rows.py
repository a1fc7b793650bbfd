"""Attention over some rows of pages in an engine's memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.kernels import cpu, triton_support
from kvsketch.kernels.paged import over
from kvsketch.observed import Observed
from kvsketch.page.memory import rows_of
from kvsketch.page.part import Part
from kvsketch.page.rows import Rows
from kvsketch.partial import NOTHING, partial, together


def attend(asked: Observed, parts: Sequence[Part], rows: Rows, new: Part | None) -> Tensor:
    """Attention of the newest tokens of A requests.

    Args:
        asked: queries ``[A, num_attention_heads, q, head_dim]``.
        parts: of all pages; the last one is the window, of which ``rows.reads`` slots are read.
        new: the tokens of the queries, if the window does not hold them yet. None: it does, and
            q is 1.

    Returns:
        ``[A, num_attention_heads, q, value_dim]``.
    """
    if new is None and (found := cpu.attend(asked, parts, rows=rows)) is not None:
        return found[0]
    batch, heads, q, dim = asked.queries.shape
    window, dtype = parts[-1], parts[-1].fields["keys"].dtype
    packed = asked.queries.reshape(batch, window.heads, -1, dim)
    each = [_over_middle(packed.to(dtype), part, asked, rows) for part in parts[:-1]]
    if new is not None and triton_support.chosen(packed):
        from kvsketch.kernels.triton_prefill import prefill

        k, v = new.fields["keys"], new.fields["values"]
        flat = _flat(window, rows, asked)
        each.append(prefill(asked.queries, new_keys=k, new_values=v, **flat))
    else:
        if rows.most:
            each.append(_over_window(packed, window, asked, rows))
        if new is not None:
            group = heads // window.heads
            wide = [new.fields[n].repeat_interleave(group, dim=1) for n in ("keys", "values")]
            scale = asked.scaling, asked.softcap
            each.append(partial(asked.queries, wide[0], wide[1], None, *scale, True))
    shape = (batch, heads, q)
    flat_parts = [(o.reshape(*shape, -1).to(dtype), total.reshape(shape)) for o, total in each]
    out, total = together(flat_parts)
    if asked.sinks is not None:
        sinks = asked.sinks.to(total.dtype).view(-1, 1)
        out = out * torch.sigmoid(total - sinks).unsqueeze(-1).to(out.dtype)
    return out


def _over_middle(packed: Tensor, part: Part, asked: Observed, rows: Rows) -> tuple[Tensor, Tensor]:
    """All slots of a part, as ``paged.over``; without a copy if the pages are at equal distances
    and their heads have the same size."""
    plain = len(rows.runs) == 1 and part.blocks is None
    return over(packed, rows_of(part, rows.runs[0] if plain else rows.pages), asked)


def _over_window(
    packed: Tensor, window: Part, asked: Observed, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The slots of the window that are read. The Triton kernel takes the pages' numbers. Without
    it, pages at equal distances are read in one call: even one call per page costs less than a
    copy of them."""
    if triton_support.chosen(packed):
        from kvsketch.kernels.triton_decode import decode

        queries = packed.flatten(1, 2).unsqueeze(2)
        out, total = decode(queries, **_flat(window, rows, asked), most=rows.most)
        return out.view(*packed.shape[:3], -1), total.view(packed.shape[:3])
    sizes = [len(range(run.start, run.stop, run.step)) for run in rows.runs]
    split = torch.split(packed.to(window.fields["keys"].dtype), sizes)
    found = [
        over(some, _read(window, run, rows, reads), replace(asked, queries=some))
        for some, run, reads in zip(split, rows.runs, torch.split(rows.reads, sizes), strict=True)
    ]
    outs, totals = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(totals)


def _read(window: Part, run: slice, rows: Rows, reads: Tensor) -> Part:
    """The slots of a run of pages that are read, ``reads`` of each. Those behind them may hold
    tokens that were rejected."""
    part = rows_of(window, run, rows.most)
    if len(rows.reads) > 1:
        unread = torch.arange(rows.most, device=reads.device) >= reads.view(-1, 1, 1)
        log_mass = part.fields["log_mass"][:, :, : rows.most]
        part.fields["log_mass"] = log_mass.masked_fill(unread, NOTHING)
    return part


@functools.lru_cache(maxsize=64)
def _starts(heads: int, slots: int, device: torch.device) -> Tensor:
    """Where the heads of a window start, int64 ``[heads]``; not made anew for every token."""
    return torch.arange(heads, device=device) * slots


def _flat(window: Part, rows: Rows, asked: Observed) -> dict[str, Any]:
    """Arguments of the Triton kernels: the heads of a page one after the other, and the page of
    each row."""
    starts = _starts(window.heads, window.base, rows.pages.device)
    shape = (len(rows.pages), window.heads)
    return {
        "keys": window.fields["keys"].flatten(1, 2),
        "values": window.fields["values"].flatten(1, 2),
        "log_mass": window.fields["log_mass"].flatten(1, 2),
        "start": starts.expand(shape),
        "count": rows.reads.unsqueeze(1).expand(shape),
        "pages": rows.pages,
        "scaling": asked.scaling,
        "softcap": asked.softcap,
    }
