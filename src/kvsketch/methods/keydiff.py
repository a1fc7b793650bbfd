"""KeyDiff: keep the keys least like the average key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvsketch.methods.base import Compressor, keep_top
from kvsketch.slots import Slots, compute_dtype

# Of a norm, as in torch's normalize.
_LEAST = 1e-12


class KeyDiff(Compressor):
    """Keep the keys with the smallest cosine similarity to the mean of the normalised keys.

    Algorithm 1 of the paper with the anchor of section 3 (and kvpress's KeyDiffPress: the same
    tokens are kept when it sees the same keys). The anchor is the mean over the slots that compete
    for the budget: sinks and recent tokens, which are kept anyway, have no part in it. A slot of
    mass m counts m times. Computed in at least float32.
    """

    name = "keydiff"
    paper = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction (2504.15364)"
    ragged = True
    keeps_tokens = True

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        return keep_top(slots, -similarity(slots), budget)


def similarity(slots: Slots) -> Tensor:
    """Cosine similarity of each key to the mean direction of all keys, ``[batch, heads, n]``."""
    dtype = compute_dtype(slots.keys.dtype)
    keys = slots.keys.to(dtype)
    norm = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_(min=_LEAST)
    # Its length plays no part in a cosine: a sum serves as well as a mean. Dead slots add 0.
    weight = slots.masses().to(dtype).unsqueeze(-1) / norm
    anchor = F.normalize(keys.mT @ weight, dim=2)
    cosines: Tensor = (keys @ anchor) / norm
    return cosines.squeeze(-1)
