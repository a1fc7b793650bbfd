"""Attention Matching (Zweiger et al. 2026, arXiv:2602.16284), by the authors' own code.

KVSKETCH_ATTENTION_MATCHING names a checkout of their repository, github.com/adamzweiger/compaction.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import folder
from benchmarks.peers.exchange import PeerError
from kvsketch import InputError, Observed, Slots
from kvsketch.methods.kvzip import KVzip
from kvsketch.random_numbers import places

VARIABLE = "KVSKETCH_ATTENTION_MATCHING"
_WHERE = (
    VARIABLE,
    "compaction/algorithms/highest_attention_keys.py",
    "HighestAttentionKeysCompaction",
    ("score_method", "nnls_iters", "nnls_lower_bound", "nnls_upper_bound", "c2_method"),
)


def available() -> str | None:
    """None if their code can be run, else what is missing or wrong."""
    return folder.missing(*_WHERE)


class AttentionMatching(KVzip):
    """Keys of the highest attention, then beta = log m by non-negative least squares on the totals
    of the queries, then values by least squares on their outputs. Their class, with their settings
    ``highest_attn_keys_rms_nnls2_-3_3_lsq`` (evaluation/configs/algorithms/best.py); keys chosen by
    orthogonal matching pursuit, their slower form, are not measured here.

    The queries are those of a second reading of the context, as in their "repeat-prefill". Budgets
    are divided by KVzip's scores over the model: the authors' own divisions were computed
    beforehand for other models.
    """

    name = "peer:attention_matching"
    paper = "Zweiger et al., Fast KV Compaction via Attention Matching (2602.16284)"
    ragged = False
    #: of a layer's second reading, of every query head: about all of our prompts'
    queries_kept = 4096
    _asked: Observed | None = None
    _heads = 0

    def compress(
        self,
        slots: Slots,
        budget: int | Tensor,
        observed: Observed | None = None,
        **options: Any,
    ) -> Slots:
        self._asked, self._heads = observed, slots.keys.shape[1]
        return super().compress(slots, budget, observed, **options)

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        asked = self._asked
        if (
            asked is None
            or not asked.plain
            or slots.mass is not None
            or not isinstance(budget, int)
        ):
            raise InputError(f"{self.name} needs queries, and tokens without padding")
        dim = slots.keys.shape[-1]
        queries = asked.queries.unflatten(1, (self._heads, -1)).flatten(2, 3).flatten(0, 1)
        queries = queries * (asked.scaling * dim**0.5)  # theirs is 1 / sqrt(dim)
        if self._places is not None:  # some of the heads
            every = places(torch.arange(len(asked.queries)), self._heads).flatten()
            queries = queries[torch.searchsorted(every, self._places.flatten())]
        bounds = {"nnls_lower_bound": math.exp(-3), "nnls_upper_bound": math.exp(3)}
        settings = {"score_method": "rms", "nnls_iters": 2, "c2_method": "lsq", **bounds}
        compact = folder.load(*_WHERE)(**settings).compute_compacted_cache
        rows = zip(slots.keys.flatten(0, 1), slots.values.flatten(0, 1), queries, strict=True)
        found: list[tuple[Tensor, ...]] = []
        for keys, values, asked in rows:
            kept, beta, means, index = compact(keys, values, asked, budget)
            if not torch.equal(kept, keys[index]):
                raise PeerError(f"{self.name}: its keys are not those of its indices")
            order = torch.as_tensor(index).argsort()
            found.append((torch.as_tensor(index)[order], beta[order], means[order]))
        batch, heads = slots.keys.shape[:2]
        index, log_mass, means = (
            torch.stack(part).unflatten(0, (batch, heads)) for part in zip(*found, strict=True)
        )
        mass = log_mass.float().exp()
        return replace(slots.take(index), values=means * mass.unsqueeze(-1), mass=mass)


#: The methods that run a peer's own code in a cache, by name.
METHODS = {AttentionMatching.name: AttentionMatching}
