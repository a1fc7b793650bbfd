"""Attention of one layer over the pages of a batch of requests, and compression in place.

A page in one part is compressed as a whole. In a page with a middle, the window holds sinks, recent
tokens and a buffer: when it is full, the tokens between sinks and recent tokens are compressed
together with the slots of the middle. While all of them fit, all are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.attention import attend_to
from kvsketch.cache.compress import compress
from kvsketch.cache.scores import scored
from kvsketch.kernels.native import one_thread
from kvsketch.methods.base import Compressor
from kvsketch.observed import Observed
from kvsketch.page.layout import Layout
from kvsketch.page.memory import clear
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.rounds import Full, Round, Writes


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
        sinks: as ``softcap``.
    """

    def __init__(
        self,
        layout: Layout,
        method: Compressor | None,
        rhythm: Rhythm,
        scaling: float,
        softcap: float | None = None,
        counts: Counts | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.layout, self.method, self.rhythm, self.counts = layout, method, rhythm, counts
        self.scaling, self.softcap, self.sinks = scaling, softcap, sinks

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
                    clear(part, now.rows.pages[now.fresh])
            if now.tokens.shape[1] == 1:
                self._write(now.writes, page.exact, waiting, queries, keys, values)
                q = queries if now.answered is None else queries[now.answered]
                asked, new = self._asked(q.unsqueeze(2)), None
            else:
                q, k, v = (t[now.tokens].transpose(1, 2) for t in (queries, keys, values))
                asked, new = self._asked(q), Part.of_tokens(Slots(k, v))
            parts = page.open() if now.compressed else [page.exact]
            found = attend_to(asked, parts, rows=now.rows, new=new)
            if new is not None:
                self._write(now.writes, page.exact, waiting, queries, keys, values)
            found = found.transpose(1, 2).to(out.dtype)
            found = found.flatten(0, 1) if now.own is None else found[now.own]
            if now.answered is None:
                out.copy_(found)
            else:
                out[now.answered] = found
            for full in now.full:
                self._compress_full(full, now.rows.pages, held, queries, keys, values)
            if now.after is not None:
                _copy(held, now.after)

    def _compress_full(
        self,
        full: Full,
        pages: Tensor,
        held: tuple[Page, Tensor],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Compress the pages of a round that are full, with the tokens of the batch for which they
        have no room."""
        (page, waiting), method = held, self.method
        if method is None:
            return
        rows, again = pages[full.which], None
        slots = full.window + full.between + (0 if full.tokens is None else full.tokens.shape[1])
        with one_thread(len(rows) * slots * keys.shape[1] * keys.shape[2], keys.device):
            # Random numbers depend on the tokens of a page, so that a request gets the same ones
            # whatever else is in the batch.
            method.restart(full.seen)
            before = page.rows(rows, full.window, *method.around, full.between)
            if full.tokens is None:
                asked = self._asked(waiting.index_select(0, rows).nan_to_num_(0.0, 0.0, 0.0))
            else:
                q, k, v = (t[full.tokens].transpose(1, 2) for t in (queries, keys, values))
                before = before.grown(k.shape[2])
                before.append(Slots(k, v))
                asked = self._asked(q.nan_to_num(0.0, 0.0, 0.0))
                if method.requires.echo:
                    again = replace(asked, after=True)
            self._compress(method, rows, page, before, asked, again)

    def _asked(self, queries: Tensor) -> Observed:
        return Observed(queries, self.scaling, self.softcap, sinks=self.sinks)

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
        if to.queried is not None:
            q = queries[to.queried.tokens].to(waiting.dtype)
            waiting[to.queried.pages, :, to.queried.places] = q
        if to.tokens is not None:
            keys, values = keys[to.tokens], values[to.tokens]
        for name, new in (("keys", keys), ("values", values)):
            field = window.fields[name]
            field[to.pages, :, to.slots] = new.to(field.dtype)
        window.fields["log_mass"][to.pages, :, to.slots] = 0.0

    def _compress(
        self,
        method: Compressor,
        rows: Tensor,
        page: Page,
        before: Page,
        asked: Observed,
        again: Observed | None,
    ) -> None:
        """Compress pages in place.

        Args:
            rows: of pages with as many slots in the middle.
            before: what they hold, and tokens for which they have no room.
            asked: their last queries.
            again: all queries of these tokens, asked again after them, if the method wants them.
        """
        rhythm, layout, around = self.rhythm, self.layout, method.around
        # A request whose numbers overflow has lost its own answer, but a method would refuse the
        # whole batch because of it.
        for name in ("keys", "values"):
            before.exact.fields[name].nan_to_num_(0.0, 0.0, 0.0)
        slots = before.read(exactly=before.middle is not None)
        if method.requires.queries:
            slots = scored(method, slots, asked, again)
        kept: int | Tensor = rhythm.kept
        if layout.uneven:
            kept = layout.sizes(len(rows), torch.device("cpu")) + sum(around)
        elif layout.middle:
            kept = layout.middle[0] + sum(around)
        after = compress(
            before,
            slots,
            method,
            kept,
            again or asked,
            limit=kept,
            room=lambda kept: 0,  # it is in the engine's memory
            bits=layout.bits,
            apart=bool(layout.middle),
            around=around,
        )
        page.store(after, rows)
        if self.counts is not None:
            self._count(self.counts, asked, slots, after.open())

    def _count(self, counts: Counts, asked: Observed, before: Slots, now: Sequence[Part]) -> None:
        """Compare the last query's attention over the slots before with that over ``now``."""
        last = replace(asked, queries=asked.queries[:, :, -1:])
        was = attend_to(last, before)[:, :, 0].float()
        is_ = attend_to(last, now)[:, :, 0].float()
        error = (is_ - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)
        counts.compressions += len(was)
        each = error.mean(1)
        counts.errors += float(each.sum())
        counts.above += int((each > counts.tolerance).sum())


def _copy(held: tuple[Page, Tensor], pages: Tensor) -> None:
    """Copy pages ``pages[0]`` to ``pages[1]``, int64 ``[2, n]``."""
    page, waiting = held
    for tensor in (waiting, *(t for part in page.open() for t in part.contents())):
        tensor.index_copy_(0, pages[1], tensor.index_select(0, pages[0]))
