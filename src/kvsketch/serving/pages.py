"""Attention of one layer over fixed pages for a batch of requests, and compression in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.window import Windowed
from kvsketch.kernels import triton_support
from kvsketch.observed import Observed
from kvsketch.partial import NOTHING, log_mass, partial, together
from kvsketch.serving.layout import Fields
from kvsketch.serving.rhythm import Rhythm, Round, Writes
from kvsketch.slots import Slots, compute_dtype


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
    """The pages of one layer.

    Args:
        method: the method with its sinks and recent window; None: nothing is compressed.
        rhythm: when pages are compressed.
        scaling, softcap: of the model, see ``observed.Observed``.
        counts: updated at every compression; None: errors are not measured.
    """

    def __init__(
        self,
        method: Windowed | None,
        rhythm: Rhythm,
        scaling: float,
        softcap: float | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.method, self.rhythm, self.counts = method, rhythm, counts
        self.scaling, self.softcap = scaling, softcap
        self._starts: Tensor | None = None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        fields: Fields,
        todo: Sequence[Round],
        out: Tensor,
    ) -> None:
        """Write the tokens of a batch to their pages and compute their attention.

        Args:
            queries: ``[tokens, num_attention_heads, head_dim]``.
            keys: ``[tokens, num_key_value_heads, head_dim]``; values likewise.
            fields: the parts of all pages.
            todo: the rounds of the batch, in order.
            out: the result is written here, ``[tokens, num_attention_heads, value_dim]``.
        """
        for now in todo:
            if now.before is not None:
                _copy(fields, now.before)
            if len(now.fresh):
                self._clear(now.pages[now.fresh], fields)
            if now.tokens.shape[1] == 1:
                self._write(now.writes, fields, queries, keys, values)
                found = self._decoded(now, fields, queries)
            else:
                q, k, v = (t[now.tokens].transpose(1, 2) for t in (queries, keys, values))
                found = self._chunk(now, fields, q, k, v)
                self._write(now.writes, fields, queries, keys, values)
            found = found.transpose(1, 2).to(out.dtype)
            found = found.flatten(0, 1) if now.own is None else found[now.own]
            if now.writes.tokens is None:
                out.copy_(found)
            else:
                out[now.writes.tokens] = found
            for full, times in ((now.first, None), (now.again, now.times)):
                if self.method is not None and len(full):
                    # Random numbers depend on how often a page was compressed, so that a request
                    # gets the same ones whatever else is in the batch.
                    self.method.restart(torch.zeros_like(full) if times is None else times)
                    self._compress(self.method, now.pages[full], fields, times is not None)
            if now.after is not None:
                _copy(fields, now.after)

    def _clear(self, pages: Tensor, fields: Fields) -> None:
        """Clear pages of new requests: zero times a leftover infinity would be NaN."""
        fields.keys.index_fill_(0, pages, 0)
        fields.values.index_fill_(0, pages, 0)
        fields.log_mass.index_fill_(0, pages, NOTHING)
        fields.score.index_fill_(0, pages, 0)

    def _write(
        self, to: Writes, fields: Fields, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Write new tokens after the slots of their pages, and the last queries before a
        compression."""
        if to.tokens is not None:
            queries, keys, values = (t[to.tokens] for t in (queries, keys, values))
        fields.keys[to.pages, :, to.slots] = keys.to(fields.keys.dtype)
        fields.values[to.pages, :, to.slots] = values.to(fields.values.dtype)
        fields.log_mass[to.pages, :, to.slots] = 0.0
        if to.queried is not None:
            q = queries[to.queried].to(fields.queries.dtype)
            fields.queries[to.pages[to.queried], :, to.places] = q

    def _decoded(self, now: Round, fields: Fields, queries: Tensor) -> Tensor:
        """Attention of one query per head over its page, ``[A, num_attention_heads, 1,
        value_dim]``."""
        q = queries if now.writes.tokens is None else queries[now.writes.tokens]
        rows, heads, dim = q.shape
        packed = q.view(rows, fields.keys.shape[1], -1, dim)
        found = [self._window(packed, now, fields), *self._others(packed, now, fields)]
        return together(found)[0].reshape(rows, heads, 1, -1)

    def _others(self, packed: Tensor, now: Round, fields: Fields) -> list[tuple[Tensor, Tensor]]:
        """Attention over the parts of a page other than its window, and the logs of its totals."""
        return []

    def _window(self, packed: Tensor, now: Round, fields: Fields) -> tuple[Tensor, Tensor]:
        """Attention over the slots that a round reads, and the logs of its totals. The Triton
        kernel takes the pages' numbers. Without it, pages at equal distances are read in one call:
        even one call per page costs less than a copy of them."""
        if triton_support.chosen(packed):
            from kvsketch.kernels.triton_decode import decode

            queries = packed.flatten(1, 2).unsqueeze(2)
            out, total = decode(queries, **self._flat(now, fields), most=now.most)
            return out.view(*packed.shape[:3], -1), total.view(packed.shape[:3])
        parts = fields.keys, fields.values, fields.log_mass
        asked, runs, most = packed.to(fields.keys.dtype), now.runs, now.most
        if len(runs) == 1:
            return self._among(asked, *(part[runs[0], :, :most] for part in parts))
        sizes = [len(range(run.start, run.stop, run.step)) for run in runs]
        outs, totals = zip(
            *(
                self._among(some, *(part[run, :, :most] for part in parts))
                for some, run in zip(torch.split(asked, sizes), runs, strict=True)
            ),
            strict=True,
        )
        return torch.cat(outs), torch.cat(totals)

    def _among(
        self, packed: Tensor, keys: Tensor, values: Tensor, log_mass: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention over slots of one tensor, and the logs of its totals."""
        return partial(packed, keys, values, log_mass.unsqueeze(2), self.scaling, self.softcap)

    def _chunk(self, now: Round, fields: Fields, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of several queries per head over the page and, causally, the new tokens."""
        rows, heads, count, dim = q.shape
        kv_heads = fields.keys.shape[1]
        group = heads // kv_heads
        packed = q.reshape(rows, kv_heads, group * count, dim)
        before = self._others(packed, now, fields)
        if triton_support.chosen(q):
            from kvsketch.kernels.triton_prefill import prefill

            parts = [prefill(q, new_keys=k, new_values=v, **self._flat(now, fields))]
        else:
            wide = [t.repeat_interleave(group, dim=1) for t in (k, v)]
            parts = [partial(q, wide[0], wide[1], None, self.scaling, self.softcap, True)]
            if now.most:
                before.append(self._window(packed, now, fields))
        shape = (rows, heads, count)
        parts += [(out.reshape(*shape, -1).to(q.dtype), log.reshape(shape)) for out, log in before]
        return together(parts)[0]

    def _flat(self, now: Round, fields: Fields) -> dict[str, Any]:
        """Arguments of the Triton kernels for the slots that a round reads: the heads of a page one
        after the other, and the page of each row."""
        heads, slots = fields.keys.shape[1:3]
        if self._starts is None:
            self._starts = torch.arange(heads, device=fields.keys.device) * slots
        shape = (len(now.pages), heads)
        return {
            "keys": fields.keys.flatten(1, 2),
            "values": fields.values.flatten(1, 2),
            "mass": fields.log_mass.flatten(1, 2),
            "start": self._starts.expand(shape),
            "count": now.reads.unsqueeze(1).expand(shape),
            "pages": now.pages,
            "logged": True,
            "scaling": self.scaling,
            "softcap": self.softcap,
        }

    def _compress(self, method: Windowed, pages: Tensor, fields: Fields, again: bool) -> None:
        """Compress full pages in place.

        Args:
            again: whether they were compressed before.
        """
        kept = self.rhythm.slots - self.rhythm.buffer
        slots, observed = self._full(pages, fields)
        after = self._reduced(method, slots, kept, observed)
        masses, means = after.masses(), after.mean_values().to(fields.values.dtype)
        if self.counts is not None:
            self._count(self.counts, observed, slots, self._seen(observed, after))
        fields.keys[pages, :, :kept] = after.keys.to(fields.keys.dtype)
        fields.values[pages, :, :kept] = means
        fields.log_mass[pages, :, :kept] = log_mass(masses.float())
        fields.log_mass[pages, :, kept:] = NOTHING
        if after.score is not None and fields.score.shape[2]:
            fields.score[pages, :, :kept] = after.score.float()

    def _full(self, pages: Tensor, fields: Fields) -> tuple[Slots, Observed]:
        """The slots of pages and their last queries. Non-finite numbers become zeros: a request
        whose numbers overflow has lost its own answer, but a method would refuse the whole batch
        because of it."""
        keys, values, queries = (
            t.index_select(0, pages).nan_to_num_(0.0, 0.0, 0.0)
            for t in (fields.keys, fields.values, fields.queries)
        )
        mass = fields.log_mass.index_select(0, pages).exp_()
        values = values.to(compute_dtype(values.dtype)) * mass.unsqueeze(-1)
        score = fields.score.index_select(0, pages) if fields.score.shape[2] else None
        observed = Observed(queries, self.scaling, self.softcap)
        return Slots(keys, values, mass, score=score), observed

    def _reduced(
        self, method: Windowed, slots: Slots, kept: int | Tensor, observed: Observed
    ) -> Slots:
        """The compressed slots. The method runs without its least-squares fit: a preempted request
        reads its decoded tokens again as part of the prompt, and must get the same slots as
        before."""
        if method.needs_queries:
            slots = method.observe(slots, observed)
        return method(slots, kept, observed, scored=True, fit=False)

    def _last(self, observed: Observed, heads: int) -> Tensor:
        """The last query, ``[rows, heads, group, head_dim]``."""
        last = observed.queries[:, :, -1]
        return last.reshape(len(last), heads, -1, last.shape[-1])

    def _seen(self, observed: Observed, slots: Slots) -> tuple[Tensor, Tensor]:
        """Attention of the last query over slots, and the log of its total."""
        packed = self._last(observed, slots.keys.shape[1])
        means = slots.mean_values().to(packed.dtype)
        bias = log_mass(slots.masses()).unsqueeze(2)
        keys = slots.keys.to(packed.dtype)
        return partial(packed, keys, means, bias, self.scaling, self.softcap)

    def _count(
        self, counts: Counts, observed: Observed, slots: Slots, now: tuple[Tensor, Tensor]
    ) -> None:
        """Compare the last query's attention over ``slots`` with that after the compression."""
        was, is_ = self._seen(observed, slots)[0].float(), now[0].float()
        error = (is_ - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)
        counts.compressions += len(was)
        each = error.mean((1, 2))
        counts.errors += float(each.sum())
        counts.above += int((each > counts.tolerance).sum())


def _copy(fields: Fields, pages: Tensor) -> None:
    """Copy pages ``pages[0]`` to ``pages[1]``, int64 ``[2, n]``."""
    for part in fields.parts():
        part.index_copy_(0, pages[1], part.index_select(0, pages[0]))
