"""Key norm: keep the keys of smallest norm."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods.base import Compressor, keep_top
from kvsketch.slots import Slots, compute_dtype


class KNorm(Compressor):
    """Keep the keys of smallest l2 norm: they tend to receive most attention.

    The rule of section 3 (and kvpress's KnormPress: the same tokens are kept); the paper leaves
    the first two layers uncompressed, which is a budget schedule here. Norms are taken in at least
    float32, since bfloat16 would tie many of them. Masses play no part.
    """

    name = "knorm"
    paper = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy (2406.11430)"
    ragged = True
    keeps_tokens = True

    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        dtype = compute_dtype(slots.keys.dtype)
        norm = torch.linalg.vector_norm(slots.keys, dim=-1, dtype=dtype)
        return keep_top(slots, -norm, budget)
