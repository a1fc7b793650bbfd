"""A layer's attention over fixed pages, for a batch of requests, and their compression in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.window import Windowed
from ..kernels.partial import NOTHING, log_mass, partial, together
from ..slots import Observed, Slots, compute_dtype
from .layout import Fields
from .rhythm import Rhythm, Round, Writes

# Pages are close together if there are at most so many in their span for each of them.
_DENSE = 2


@dataclass
class Counts:
    """What was done, for whoever watches.

    Attributes:
        compressions: of a page.
        errors: the sum over them of the relative error that a compression adds to the last query's
            output, mean over heads.
    """

    compressions: int = 0
    errors: float = 0.0


class Workspace:
    """Where the pages of a batch are laid side by side: memory that is used again and again, since
    new memory costs more than the copy. One for all layers, which run one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def rows(self, number: int, part: Tensor, pages: Tensor) -> Tensor:
        """``part[pages]``, until it is asked for the same ``number`` again."""
        shape = torch.Size((len(pages), *part.shape[1:]))
        key, size = (number, part.dtype), shape.numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size or buffer.device != part.device:
            buffer = self._buffers[key] = torch.empty(size, dtype=part.dtype, device=part.device)
        out = buffer[:size].view(shape)
        return torch.index_select(part, 0, pages, out=out)


class Pages:
    """The pages of one layer.

    Args:
        method: with its sinks and recent window; None: nothing is compressed.
        rhythm: when it is.
        scaling, softcap: of the model, see ``slots.Observed``.
        counts: added to at every compression; None: nobody watches, and errors are not measured.
        workspace: shared with other layers; None: one of its own.
    """

    def __init__(
        self,
        method: Windowed | None,
        rhythm: Rhythm,
        scaling: float,
        softcap: float | None = None,
        counts: Counts | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.workspace = workspace or Workspace()
        self.method, self.rhythm, self.counts = method, rhythm, counts
        self.scaling, self.softcap = scaling, softcap

    @torch.no_grad()
    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        fields: Fields,
        todo: Sequence[Round],
        out: Tensor,
    ) -> None:
        """Take in the tokens of a batch and write what they attend to.

        Args:
            queries: ``[tokens, num_attention_heads, head_dim]``.
            keys: ``[tokens, num_key_value_heads, head_dim]``; values likewise.
            fields: of all pages.
            todo: what to do, in order.
            out: ``[tokens, num_attention_heads, value_dim]``.
        """
        for now in todo:
            if len(now.fresh):  # 0 times what another request has left might be no number
                pages = now.pages[now.fresh]
                fields.keys.index_fill_(0, pages, 0)
                fields.values.index_fill_(0, pages, 0)
                fields.log_mass.index_fill_(0, pages, NOTHING)
                fields.score.index_fill_(0, pages, 0)
            if now.tokens.shape[1] == 1:
                self._write(now.writes, fields, queries, keys, values)
                found = self._decoded(now, fields, queries)
            else:
                q, k, v = (t[now.tokens].transpose(1, 2) for t in (queries, keys, values))
                found = self._chunk(now, fields, q, k, v)
                self._write(now.writes, fields, queries, keys, values)
            found = found.transpose(1, 2).to(out.dtype)
            if now.writes.tokens is None:
                out.copy_(found.reshape(out.shape) if now.own is None else found[now.own])
            elif now.own is None:
                out[now.tokens] = found
            else:
                out[now.tokens[now.own]] = found[now.own]
            if self.method is not None and len(now.due):
                self._compress(self.method, now.pages[now.due], fields)

    def _write(
        self, to: Writes, fields: Fields, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """New tokens behind the slots of their pages, and the last queries of a period."""
        if to.tokens is not None:
            queries, keys, values = (t[to.tokens] for t in (queries, keys, values))
        fields.keys[to.pages, :, to.slots] = keys.to(fields.keys.dtype)
        fields.values[to.pages, :, to.slots] = values.to(fields.values.dtype)
        fields.log_mass[to.pages, :, to.slots] = 0.0
        if to.queried is not None:
            q = queries[to.queried].to(fields.queries.dtype)
            fields.queries[to.pages[to.queried], :, to.places] = q

    def _decoded(self, now: Round, fields: Fields, queries: Tensor) -> Tensor:
        """One query per head over its page, ``[A, num_attention_heads, 1, value_dim]``."""
        q = queries if now.writes.tokens is None else queries[now.tokens[:, 0]]
        rows, heads, dim = q.shape
        packed = q.view(rows, fields.keys.shape[1], -1, dim)
        out, _ = self._over(packed, now, fields, now.most + 1)
        return out.reshape(rows, heads, 1, -1)

    def _over(self, packed: Tensor, now: Round, fields: Fields, most: int) -> tuple[Tensor, Tensor]:
        """Attention over all slots, at most ``most``, and the logs of its totals. Pages that lie
        close together are read where they are, those between them too; others are copied."""
        parts = (fields.keys, fields.values, fields.log_mass)
        first, end = now.span
        rows, asked = now.pages - first, packed.to(fields.keys.dtype)
        dense = end - first <= _DENSE * len(rows)
        if dense:
            keys, values, bias = (part[first:end, :, :most] for part in parts)
            asked = asked.new_zeros(end - first, *asked.shape[1:]).index_copy_(0, rows, asked)
        else:
            keys, values, bias = (
                self.workspace.rows(number, part[:, :, :most], now.pages)
                for number, part in enumerate(parts)
            )
        found = partial(asked, keys, values, bias.unsqueeze(2), self.scaling, self.softcap)
        if not dense:
            return found
        return found[0].index_select(0, rows), found[1].index_select(0, rows)

    def _chunk(self, now: Round, fields: Fields, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several queries per head over its page and, causally, over themselves."""
        rows, heads, count, dim = q.shape
        kv_heads = fields.keys.shape[1]
        group = heads // kv_heads
        wide = [t.repeat_interleave(group, dim=1) for t in (k, v)]
        parts = [partial(q, wide[0], wide[1], None, self.scaling, self.softcap, True)]
        if now.most:
            packed = q.reshape(rows, kv_heads, group * count, dim)
            out, total = self._over(packed, now, fields, now.most)
            shape = (rows, heads, count)
            parts.append((out.reshape(*shape, -1).to(q.dtype), total.reshape(shape)))
        return together(parts)[0]

    def _compress(self, method: Windowed, pages: Tensor, fields: Fields) -> None:
        """Full pages, in place."""
        kept = self.rhythm.slots - self.rhythm.buffer
        keys, values, bias, queries = (
            t.index_select(0, pages)
            for t in (fields.keys, fields.values, fields.log_mass, fields.queries)
        )
        mass = bias.exp()
        wide = compute_dtype(values.dtype)
        score = fields.score.index_select(0, pages) if fields.score.shape[2] else None
        slots = Slots(keys, values.to(wide) * mass.unsqueeze(-1), mass, score=score)
        observed = Observed(queries, self.scaling, self.softcap)
        if method.needs_queries:
            slots = method.observe(slots, observed)
        # Without a fit: a preempted request reads its decoded tokens again as if they were a
        # prompt's, and must get what it got before.
        after = method(slots, kept, observed, scored=True, fit=False)
        masses = after.masses()
        weight = torch.where(masses != 0, masses, 1.0).unsqueeze(-1)
        means = (after.values / weight).to(values.dtype)
        if self.counts is not None:
            before = (keys, values, bias)
            self._count(self.counts, queries, before, (after.keys, means, log_mass(masses)))
        fields.keys[pages, :, :kept] = after.keys.to(keys.dtype)
        fields.values[pages, :, :kept] = means
        fields.log_mass[pages, :, :kept] = log_mass(masses.float())
        fields.log_mass[pages, :, kept:] = NOTHING
        if after.score is not None and fields.score.shape[2]:
            fields.score[pages, :, :kept] = after.score.float()

    def _count(
        self,
        counts: Counts,
        queries: Tensor,
        before: tuple[Tensor, Tensor, Tensor],
        after: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """What the last query sees, before and after."""
        rows, dim = len(queries), queries.shape[3]
        packed = queries[:, :, -1].reshape(rows, before[0].shape[1], -1, dim)
        was, now = (
            partial(
                packed,
                keys.to(packed.dtype),
                values,
                bias.unsqueeze(2),
                self.scaling,
                self.softcap,
            )[0].float()
            for keys, values, bias in (before, after)
        )
        error = (now - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)
        counts.compressions += rows
        counts.errors += float(error.mean((1, 2)).sum())
