"""Attention of one layer over the pages of a batch of requests, and compression in place.

A page in one part is compressed as a whole. In a page with a middle, the window holds sinks, recent
tokens and a buffer: when it is full, the tokens between sinks and recent tokens are compressed
together with the slots of the middle. While all of them fit, all are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compress import compress
from kvsketch.cache.window import Windowed
from kvsketch.kernels import triton_support
from kvsketch.kernels.paged import over
from kvsketch.observed import Observed
from kvsketch.page.layout import Layout
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.schedule import Rhythm
from kvsketch.partial import log_mass, partial, together
from kvsketch.slots import Slots
from kvsketch.vllm.rounds import Round, Writes


@dataclass
class Counts:
    """Counters of compressions and their errors.

    Attributes:
        compressions: number of page compressions.
        errors: the relative errors that these compressions add to the output of the last query
            (mean over heads), summed.
        above: number of compressions whose error is above the tolerance.
        tolerance: the largest error that a compression should add.
    """

    compressions: int = 0
    errors: float = 0.0
    above: int = 0
    tolerance: float = math.inf


class Pages:
    """What is done with the pages of one layer, which are in the engine's memory.

    Args:
        layout: of a page.
        method: the method with its sinks and recent window; None: nothing is compressed.
        rhythm: when pages are compressed, and to what.
        scaling, softcap: of the model, see ``observed.Observed``.
        counts: updated at every compression; None: errors are not measured.
    """

    def __init__(
        self,
        layout: Layout,
        method: Windowed | None,
        rhythm: Rhythm,
        scaling: float,
        softcap: float | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.layout, self.method, self.rhythm, self.counts = layout, method, rhythm, counts
        self.scaling, self.softcap = scaling, softcap
        self._starts: Tensor | None = None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        held: tuple[Page, Tensor],
        todo: Sequence[Round],
        out: Tensor,
    ) -> None:
        """Write the tokens of a batch to their pages and compute their attention.

        Args:
            queries: ``[tokens, num_attention_heads, head_dim]``.
            keys: ``[tokens, num_key_value_heads, head_dim]``; values likewise.
            held: all pages and their last queries, as ``Layout.views`` returns them.
            todo: the rounds of the batch, in order.
            out: the result is written here, ``[tokens, num_attention_heads, value_dim]``.
        """
        page, waiting = held
        for now in todo:
            if now.before is not None:
                _copy(held, now.before)
            if len(now.fresh):
                for part in page.open():
                    part.clear(now.pages[now.fresh])
            if now.tokens.shape[1] == 1:
                self._write(now.writes, page.exact, waiting, queries, keys, values)
                found = self._decoded(now, page, queries)
            else:
                q, k, v = (t[now.tokens].transpose(1, 2) for t in (queries, keys, values))
                found = self._chunk(now, page, q, k, v)
                self._write(now.writes, page.exact, waiting, queries, keys, values)
            found = found.transpose(1, 2).to(out.dtype)
            found = found.flatten(0, 1) if now.own is None else found[now.own]
            if now.writes.tokens is None:
                out.copy_(found)
            else:
                out[now.writes.tokens] = found
            if self.method is not None:
                for full in now.full:
                    # Random numbers depend on how often a page was compressed, so that a request
                    # gets the same ones whatever else is in the batch.
                    self.method.restart(full.times)
                    rows = now.pages[full.which]
                    asked = self._asked(waiting.index_select(0, rows).nan_to_num_(0.0, 0.0, 0.0))
                    self._compress(self.method, rows, page, asked, full.between)
            if now.after is not None:
                _copy(held, now.after)

    def _asked(self, queries: Tensor) -> Observed:
        return Observed(queries, self.scaling, self.softcap)

    def _write(
        self,
        to: Writes,
        window: Part,
        waiting: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Write new tokens after the slots of their pages, and the last queries before a
        compression."""
        if to.tokens is not None:
            queries, keys, values = (t[to.tokens] for t in (queries, keys, values))
        for name, new in (("keys", keys), ("values", values)):
            field = window.fields[name]
            field[to.pages, :, to.slots] = new.to(field.dtype)
        window.fields["log_mass"][to.pages, :, to.slots] = 0.0
        if to.queried is not None:
            q = queries[to.queried].to(waiting.dtype)
            waiting[to.pages[to.queried], :, to.places] = q

    def _decoded(self, now: Round, page: Page, queries: Tensor) -> Tensor:
        """Attention of one query per head over its page, ``[A, num_attention_heads, 1,
        value_dim]``."""
        q = queries if now.writes.tokens is None else queries[now.writes.tokens]
        rows, heads, dim = q.shape
        packed = q.view(rows, self.layout.heads, -1, dim)
        found = [self._window(packed, now, page.exact), *self._middle(packed, now, page)]
        return together(found)[0].reshape(rows, heads, 1, -1)

    def _middle(self, packed: Tensor, now: Round, page: Page) -> list[tuple[Tensor, Tensor]]:
        """Attention over the middle, if there is one, and the logs of its totals."""
        if page.middle is None or not now.compressed:
            return []
        # Without a copy if the pages are at equal distances and their heads have the same size.
        plain = len(now.runs) == 1 and page.middle.blocks is None
        some = page.middle.rows(now.runs[0] if plain else now.pages)
        dtype = self.layout.dtype
        out, total = over(packed.to(dtype), some, self._asked(packed))
        return [(out.to(dtype), total)]

    def _window(self, packed: Tensor, now: Round, window: Part) -> tuple[Tensor, Tensor]:
        """Attention over the slots that a round reads, and the logs of its totals. The Triton
        kernel takes the pages' numbers. Without it, pages at equal distances are read in one call:
        even one call per page costs less than a copy of them."""
        if triton_support.chosen(packed):
            from kvsketch.kernels.triton_decode import decode

            queries = packed.flatten(1, 2).unsqueeze(2)
            out, total = decode(queries, **self._flat(now, window), most=now.most)
            return out.view(*packed.shape[:3], -1), total.view(packed.shape[:3])
        sizes = [len(range(run.start, run.stop, run.step)) for run in now.runs]
        asked = torch.split(packed.to(self.layout.dtype), sizes)
        found = [
            over(some, window.rows(run, now.most), self._asked(some))
            for some, run in zip(asked, now.runs, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        outs, totals = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(totals)

    def _chunk(self, now: Round, page: Page, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of several queries per head over the page and, causally, the new tokens."""
        rows, heads, count, dim = q.shape
        group = self.layout.group
        packed = q.reshape(rows, self.layout.heads, group * count, dim)
        before = self._middle(packed, now, page)
        if triton_support.chosen(q):
            from kvsketch.kernels.triton_prefill import prefill

            parts = [prefill(q, new_keys=k, new_values=v, **self._flat(now, page.exact))]
        else:
            wide = [t.repeat_interleave(group, dim=1) for t in (k, v)]
            parts = [partial(q, wide[0], wide[1], None, self.scaling, self.softcap, True)]
            if now.most:
                before.append(self._window(packed, now, page.exact))
        shape = (rows, heads, count)
        parts += [(out.reshape(*shape, -1).to(q.dtype), log.reshape(shape)) for out, log in before]
        return together(parts)[0]

    def _flat(self, now: Round, window: Part) -> dict[str, Any]:
        """Arguments of the Triton kernels for the slots that a round reads: the heads of a page one
        after the other, and the page of each row."""
        heads, slots = self.layout.heads, self.layout.slots
        if self._starts is None:
            self._starts = torch.arange(heads, device=now.pages.device) * slots
        shape = (len(now.pages), heads)
        return {
            "keys": window.fields["keys"].flatten(1, 2),
            "values": window.fields["values"].flatten(1, 2),
            "log_mass": window.fields["log_mass"].flatten(1, 2),
            "start": self._starts.expand(shape),
            "count": now.reads.unsqueeze(1).expand(shape),
            "pages": now.pages,
            "scaling": self.scaling,
            "softcap": self.softcap,
        }

    def _compress(
        self, method: Windowed, rows: Tensor, page: Page, asked: Observed, between: int
    ) -> None:
        """Compress full pages in place.

        Args:
            rows: of pages with the same slots in the middle.
            asked: their last queries.
            between: these slots, see ``Page.rows``.
        """
        rhythm, layout = self.rhythm, self.layout
        around = method.sink, method.recent
        before = page.rows(rows, rhythm.slots, *around, between)
        # A request whose numbers overflow has lost its own answer, but a method would refuse the
        # whole batch because of it.
        for name in ("keys", "values"):
            before.exact.fields[name].nan_to_num_(0.0, 0.0, 0.0)
        slots = before.read(exactly=before.middle is not None)
        if method.requires.queries:
            slots = method.observe(slots, asked)
        kept: int | Tensor = rhythm.kept
        if layout.uneven:
            kept = layout.sizes(len(rows), torch.device("cpu")) + sum(around)
        elif layout.middle:
            kept = layout.middle[0] + sum(around)
        # Without the least-squares fit: a preempted request reads its decoded tokens again as part
        # of the prompt, and must get the same slots as before.
        after = compress(
            before,
            slots,
            method,
            kept,
            asked,
            limit=kept,
            room=lambda kept: 0,  # it is in the engine's memory
            bits=layout.bits,
            apart=bool(layout.middle),
        )
        page.store(after, rows)
        if self.counts is not None:
            self._count(self.counts, asked, slots, after.open())

    def _count(self, counts: Counts, asked: Observed, before: Slots, now: Sequence[Part]) -> None:
        """Compare the last query's attention over the slots before with that over ``now``."""
        last = asked.queries[:, :, -1]
        packed = last.reshape(len(last), self.layout.heads, -1, last.shape[-1])
        means, keys = (t.to(packed.dtype) for t in (before.mean_values(), before.keys))
        bias = log_mass(before.masses()).unsqueeze(2)
        was = partial(packed, keys, means, bias, self.scaling, self.softcap)[0].float()
        is_ = together([over(packed, part, asked) for part in now])[0].float()
        error = (is_ - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)
        counts.compressions += len(was)
        each = error.mean((1, 2))
        counts.errors += float(each.sum())
        counts.above += int((each > counts.tolerance).sum())


def _copy(held: tuple[Page, Tensor], pages: Tensor) -> None:
    """Copy pages ``pages[0]`` to ``pages[1]``, int64 ``[2, n]``."""
    page, waiting = held
    for tensor in (waiting, *(t for part in page.open() for t in part.contents())):
        tensor.index_copy_(0, pages[1], tensor.index_select(0, pages[0]))
