"""Attention of one layer over the pages of a batch of requests, and compression in place.

A page in one part is compressed as a whole. In a page with a middle, the window holds sinks, recent
tokens and a buffer: when it is full, the tokens between sinks and recent tokens are compressed
together with the slots of the middle. While all of them fit, all are kept.

Pages of requests that decode may wait until the next step: those of all layers are compressed
together then, which takes little longer than those of one (``cache.together``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.attention import attend_to
from kvsketch.cache.compress import Newest, compress
from kvsketch.cache.scores import fold, received, scored
from kvsketch.cache.together import compress_together
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

    def add(self, before: Tensor, now: Tensor) -> None:
        """Take note of compressions, by the attention ``[n, num_attention_heads, 1, value_dim]`` of
        the last query before and after them."""
        was, is_ = before[:, :, 0].float(), now[:, :, 0].float()
        error = (is_ - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)
        each = error.mean(1)
        self.compressions += len(was)
        self.errors += float(each.sum())
        self.above += int((each > self.tolerance).sum())

    def clear(self) -> None:
        """Begin again."""
        self.compressions, self.errors, self.above = 0, 0.0, 0


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
    ) -> list[Due]:
        """Write the tokens of a batch to their pages and compute their attention.

        Args:
            queries: ``[tokens, num_attention_heads, head_dim]``.
            keys: ``[tokens, num_key_value_heads, head_dim]``; values likewise.
            held: all pages and their last queries, as ``Layout.views`` returns them.
            todo: the rounds of the batch, in order.
            out: the result is written here, ``[tokens, num_attention_heads, value_dim]``.

        Returns:
            Full pages, which ``compress_all`` must compress before the next batch.
        """
        page, waiting = held
        wait: list[Due] = []
        for now in todo:
            if now.before is not None:
                _copy(held, now.before)
            if len(now.fresh):
                for part in page.open():
                    clear(part, now.rows.pages[now.fresh])
            if now.tokens.shape[1] == 1:
                self._write(now.writes, page.exact, waiting, queries, keys, values)
                q = queries if now.answered is None else queries[now.answered]
                asked, new = self.asked(q.unsqueeze(2)), None
            else:
                q, k, v = (t[now.tokens].transpose(1, 2) for t in (queries, keys, values))
                asked, new = self.asked(q), Part.of_tokens(Slots(k, v))
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
            due = []
            for full in now.full if self.method is not None else ():
                tokens = None
                if full.tokens is not None:
                    tokens = tuple(t[full.tokens].transpose(1, 2) for t in (queries, keys, values))
                due.append(Due(self, held, full, now.rows.pages[full.which], tokens))
            wait += [one for one in due if one.may_wait]
            compress_all([one for one in due if not one.may_wait])
            if now.after is not None:
                _copy(held, now.after)
        return wait

    def asked(self, queries: Tensor) -> Observed:
        """Queries of the layer."""
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


class Due:
    """Pages that are full alike.

    Args:
        pages: what is done with the pages of the layer.
        held: all pages and their last queries, as ``Layout.views`` returns them.
        full: what is in those that are full.
        rows: which these are, int64 ``[n]``.
        tokens: queries, keys and values of tokens for which they have no room, ``[n, heads, q,
            head_dim]``; None: they hold all.
    """

    def __init__(
        self,
        pages: Pages,
        held: tuple[Page, Tensor],
        full: Full,
        rows: Tensor,
        tokens: tuple[Tensor, ...] | None,
    ) -> None:
        assert pages.method is not None
        self.compressor = pages.method
        self._pages, self._held, self._full = pages, held, full
        self.rows, self._tokens = rows, tokens
        self._newest: Newest | None = None

    @property
    def may_wait(self) -> bool:
        """Whether nothing reads the pages before the next batch."""
        return self._full.over and self._tokens is None

    @property
    def numbers(self) -> int:
        """How many numbers an operation on all slots has."""
        shape = self._held[0].exact.fields["keys"].shape
        more = 0 if self._tokens is None else self._tokens[0].shape[2]
        slots = self._full.window + self._full.between + more
        return len(self.rows) * slots * shape[1] * shape[3]

    @functools.cached_property
    def _asked(self) -> Observed:
        """The queries that score the slots: those of the tokens, or the last ones."""
        if self._tokens is not None:
            queries = self._tokens[0]
        else:
            queries = self._held[1].index_select(0, self.rows)
        return self._pages.asked(queries.nan_to_num(0.0, 0.0, 0.0))

    @functools.cached_property
    def _before(self) -> Page:
        """Copies of the pages, with the tokens."""
        full = self._full
        page = self._held[0].rows(self.rows, full.window, *self.compressor.around, full.between)
        if self._tokens is not None:
            _, keys, values = self._tokens
            page = page.grown(keys.shape[2])
            page.append(Slots(keys, values))
        # A request whose numbers overflow has lost its own answer, but a method would refuse the
        # whole batch because of it.
        for name in ("keys", "values"):
            page.exact.fields[name].nan_to_num_(0.0, 0.0, 0.0)
        return page

    @functools.cached_property
    def _last(self) -> tuple[Observed, Tensor]:
        """The last query, and its attention before the compression."""
        last = replace(self._asked, queries=self._asked.queries[:, :, -1:])
        return last, attend_to(last, self._before.open())

    @functools.cached_property
    def _kept(self) -> int | Tensor:
        """Slots per KV head, or of every head, after the compression."""
        layout, around = self._pages.layout, sum(self.compressor.around)
        if layout.uneven:
            return layout.sizes(len(self.rows), torch.device("cpu")) + around
        return layout.middle[0] + around if layout.middle else self._pages.rhythm.kept

    def newest(self) -> tuple[Newest, Callable[[Page], None]] | None:
        """As ``Stream.newest``."""
        method = self.compressor
        if self._tokens is not None or not method.local or self._before.middle is None:
            return None
        self._measure()
        if method.requires.queries:
            fold(method, self._before, self._asked)
        kept, around = self._kept, method.around
        self._newest = Newest.of(self._before, kept, around=around, room=0)
        return None if self._newest is None else (self._newest, self._store)

    def compress_due(self) -> None:
        """Compress all slots. Where the newest tokens of one of several pages are too far from its
        others, each page is compressed by itself, so that no request depends on another."""
        if self._newest is not None and len(self.rows) > 1:
            compress_together([self._alone(number) for number in range(len(self.rows))])
            return
        method, page, asked = self.compressor, self._before, self._asked
        self._measure()
        again = None
        if self._tokens is not None and method.requires.echo:
            again = replace(asked, after=True)
        known = not method.requires.queries
        if self._tokens is None and page.middle is not None:
            known |= method.local or received(method, page, asked)
        slots = page.read(exactly=page.middle is not None)
        # Random numbers depend on the tokens of a page, so that a request gets the same ones
        # whatever else is in the batch.
        method.restart(self._full.seen)
        layout, kept = self._pages.layout, self._kept
        after = compress(
            page,
            slots if known else scored(method, slots, asked, again),
            method,
            kept,
            again or asked,
            limit=kept,
            room=lambda kept: 0,  # it is in the engine's memory
            bits=layout.bits,
            apart=bool(layout.middle),
            around=method.around,
        )
        self._store(after)

    def _alone(self, number: int) -> Due:
        """One of the pages, all of whose tokens it holds."""
        some = slice(number, number + 1)
        full = replace(self._full, seen=self._full.seen[some])
        return Due(self._pages, self._held, full, self.rows[some], None)

    def _measure(self) -> None:
        """Compute what errors are measured against, while the slots are as they were."""
        if self._pages.counts is not None:
            self._last  # noqa: B018

    def _store(self, page: Page) -> None:
        """Put the next pages in the place of these."""
        self._held[0].store(page, self.rows)
        if self._pages.counts is not None:
            last, before = self._last
            self._pages.counts.add(before, attend_to(last, page.open()))


@torch.no_grad()
def compress_all(due: Sequence[Due]) -> None:
    """Compress full pages of one layer, or of several."""
    if due:
        device = due[0].rows.device
        with one_thread(max(one.numbers for one in due), device):
            compress_together(due)


def _copy(held: tuple[Page, Tensor], pages: Tensor) -> None:
    """Copy pages ``pages[0]`` to ``pages[1]``, int64 ``[2, n]``."""
    page, waiting = held
    for tensor in (waiting, *(t for part in page.open() for t in part.contents())):
        tensor.index_copy_(0, pages[1], tensor.index_select(0, pages[0]))
