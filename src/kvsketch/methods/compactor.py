"""Compactor: tokens with much attention in their block, and keys of high leverage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvsketch import random_numbers
from kvsketch.errors import InputError, at_least
from kvsketch.estimator import attention_received
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.scoring import Scoring
from kvsketch.observed import Observed
from kvsketch.slots import Slots, compute_dtype

_RIDGE = 1e-2  # added to the sketched Gram matrix, as kvpress has it


class Compactor(Scoring):
    """Keep the tokens of highest non-causal attention within blocks of ``chunk`` tokens, plus
    ``blending`` times the leverage of their keys.

    Both as in the paper and in kvpress's CompactorPress. Attention: every query of a block attends
    to the whole block. The attention that a key receives is averaged over the query heads of its KV
    head, multiplied by the norm of its value, and averaged with its two neighbours'. Leverage:
    diag(X (X'X)^-1 X') of the centred keys X, projected by a Gaussian matrix to ``sketch``
    dimensions. Both are standardised to mean 0 and deviation 1 over the heads and tokens of a row,
    then added. The first ``sink`` and the last ``recent`` tokens are not scored and are kept first.

    Where it differs from kvpress's: keys are those after RoPE, while the paper uses those before it
    (a compressor does not see the model; without RoPE they agree). Attention has the model's
    scaling, which kvpress omits. A last block that is not full contains only its tokens, while
    kvpress includes its padding. Each row of a batch is standardised separately. ``blending`` is a
    number, while kvpress's default is the fraction that is removed. With whole blocks and these
    differences removed, the same tokens are kept.

    It scores a prompt. Later tokens are scored among the tokens of the same chunk, and earlier
    scores are kept.

    Args:
        chunk: tokens in a block, >= 1.
        sketch: dimensions of the projected keys, >= 1.
        blending: weight of the leverage, >= 0.
        sink: first tokens of the prompt that come first, >= 0.
        recent: last tokens likewise.

    Raises:
        InputError: an argument out of range.
    """

    name = "compactor"
    paper = "Chari and Van Durme, Compactor: Calibrated Query-Agnostic KV Compression (2507.08143)"
    requires = Requirements(queries=True, whole_prompt=True)

    def __init__(
        self,
        chunk: int = 256,
        sketch: int = 48,
        blending: float = 0.35,
        sink: int = 8,
        recent: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.chunk, self.sketch = at_least("chunk", chunk, 1), at_least("sketch", sketch, 1)
        self.sink, self.recent = at_least("sink", sink, 0), at_least("recent", recent, 0)
        if isinstance(blending, bool) or not blending >= 0:
            raise InputError(f"blending={blending!r} must be a number >= 0")
        self.blending = blending

    def scores(self, slots: Slots, observed: Observed) -> Tensor:
        q, batch = observed.queries.shape[2], len(slots.keys)
        new, queries, live = slots.narrow(slots.count - q, q), observed.queries, observed.live
        order = None
        if live is None:
            live = torch.ones(batch, q, dtype=torch.bool, device=queries.device)
        else:  # live tokens first
            order = live.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            new = new.take(order.unsqueeze(1).expand(new.keys.shape[:3]))
            queries = queries.gather(2, order[:, None, :, None].expand_as(queries))
        place = torch.arange(q, device=live.device)
        sink, recent = (self.sink, self.recent) if slots.score is None else (0, 0)
        between = (place >= sink) & (place < live.sum(-1, keepdim=True) - recent)
        first = min(sink, q - 1)  # what lies before it takes no part in any row
        keys, values = new.keys[:, :, first:], new.mean_values()[:, :, first:]
        there = between[:, first:]
        part = replace(new.narrow(first, q - first), score=None)
        asked = replace(observed, queries=queries[:, :, first:], live=there)
        norm = torch.linalg.vector_norm(values, dim=-1, dtype=compute_dtype(values.dtype))
        attended = self._attention(part, asked) * norm.float()
        attended = F.avg_pool1d(attended, 3, stride=1, padding=1)
        leverage = leverage_scores(keys, there, self._gaussian(new.keys))
        score = self.blending * _standard(leverage.float(), there) + _standard(attended, there)
        score = F.pad(score, (first, 0)).masked_fill(~between.unsqueeze(1), 0.0)
        # What comes first, above all others of the row; of these the newest.
        number = (~between).cumsum(-1).float() / (q + 1)
        top = score.amax((1, 2)).clamp(min=0).unsqueeze(-1) + 1 + number
        score = torch.where(between.unsqueeze(1), score, top.unsqueeze(1))
        if order is not None:
            score = torch.zeros_like(score).scatter(-1, order.unsqueeze(1).expand_as(score), score)
        if slots.score is None:
            return F.pad(score, (slots.count - q, 0))
        return torch.cat([slots.score[..., : slots.count - q], score], dim=-1)

    def _attention(self, slots: Slots, observed: Observed) -> Tensor:
        """What every slot receives from the queries of its block in all, 0 for those that are not
        there, float32 ``[batch, heads, n]``."""
        batch, heads, n = slots.keys.shape[:3]
        blocks, short = -(-n // self.chunk), -n % self.chunk
        assert observed.live is not None
        live = F.pad(observed.live, (0, short)).view(batch * blocks, -1)

        def cut(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, short))
            x = x.view(batch, x.shape[1], blocks, self.chunk, *x.shape[3:])
            return x.transpose(1, 2).flatten(0, 1)

        asked = replace(observed, queries=cut(observed.queries), live=live, after=True)
        some = slots.map(cut).only(live.unsqueeze(1))
        received = attention_received(some, asked).float().view(batch, blocks, heads, self.chunk)
        return received.transpose(1, 2).flatten(2)[..., :n]

    def _gaussian(self, keys: Tensor) -> Tensor:
        """Standard normal numbers ``[batch, heads, head_dim, sketch]`` over sqrt(sketch)."""
        batch, heads, _, dim = keys.shape
        keys_of = self.streams(batch, heads, keys.device)
        uniform = random_numbers.uniform(keys_of, dim, self.sketch).clamp(min=2.0**-54)
        normal: Tensor = torch.special.ndtri(uniform)
        return normal.div(self.sketch**0.5)


def leverage_scores(keys: Tensor, live: Tensor, sketch: Tensor) -> Tensor:
    """Leverage of every key among the live ones, after a projection: float64 ``[batch, heads, n]``.

    Args:
        keys: ``[batch, heads, n, head_dim]``.
        live: bool ``[batch, n]``.
        sketch: what centred keys are multiplied by, ``[batch, heads, head_dim, k]``.
    """
    there = live[:, None, :, None].double()
    wide = keys.double()
    mean = (wide * there).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
    x = ((wide - mean) * there) @ sketch.double()
    gram = x.mT @ x
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    root = torch.linalg.cholesky(gram)
    white: Tensor = torch.linalg.solve_triangular(root, x.mT, upper=False)
    return white.square().sum(-2)


def _standard(score: Tensor, live: Tensor) -> Tensor:
    """``[batch, heads, n]`` with mean 0 and deviation 1 over the live tokens of all heads."""
    there = live.unsqueeze(1).expand_as(score)
    count = there.sum((1, 2), keepdim=True)
    mean = (score * there).sum((1, 2), keepdim=True) / count.clamp(min=1)
    away = (score - mean) * there
    variance = away.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)
    return away / variance.sqrt().clamp(min=1e-6)
