"""KVzip+: KVzip's attention, weighted by its contribution to the hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.kvzip import KVzip
from kvsketch.methods.output import output_norms
from kvsketch.methods.rereading import reread_attention
from kvsketch.observed import Observed
from kvsketch.reread import looked_at
from kvsketch.slots import Slots


class KVzipPlus(KVzip):
    """KVzip with the normalisation that its form for training KVzap has: what a query gives a token
    is multiplied by the norm of what the token's value becomes in the output, v W_O, for the query
    head that gives it, and divided by the norm of the hidden state that the query was made from, as
    it enters the attention module (kvpress's KVzipPress with ``kvzip_plus_normalization``: the same
    tokens are kept).

    Costs what KVzip does, and the products v W_O of every token in every query head. It needs the
    weight of the model's output projection, as ``CriticalKV`` does.
    """

    name = "kvzip_plus"
    paper = "Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning (2601.07891)"
    requires = replace(KVzip.requires, values=True, output=True, weights="hidden")
    above = torch.inf

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        if observed.weights is None:
            raise InputError(
                f"{self.name} weights the queries of a second reading: pass Observed(weights=...), "
                "as kvsketch.prefill(..., queries='reread') does"
            )
        part = looked_at(slots, about, observed.queries.shape[2])[1]
        factors = output_norms(part, self.output, self.name, order=2)
        return reread_attention(slots, observed, about, factors)
