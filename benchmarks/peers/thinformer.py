"""Thinformer's kernel halving (Carrell et al. 2025), from a checkout that KVSKETCH_THINFORMER names
(github.com/microsoft/thinformer)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers import folder
from kvsketch import Slots

VARIABLE = "KVSKETCH_THINFORMER"
_WHERE = (
    VARIABLE,
    "thinformer/thinformer.py",
    "halve",
    ("key", "value", "shift", "b_sqd", "halve_prob", "symmetrize"),
)


def available() -> str | None:
    """None where their code can be run; else what is missing or wrong."""
    return folder.missing(*_WHERE)


def halved(keys: Tensor, values: Tensor, rounds: int, seed: int = 0, delta: float = 0.5) -> Slots:
    """Their ``halve``, ``rounds`` times over the whole sequence. Their attention layer halves
    buckets instead (KH-Compress), to be fast; this is the halving alone, at its best.

    Args:
        keys: float ``[batch, num_key_value_heads, n, head_dim]``, n a multiple of 2^rounds. Memory
            is n x n per head.
        values: ``[batch, num_key_value_heads, n, value_dim]``.
        rounds: halvings, >= 1.
        delta: failure probability, split over the rounds.

    Returns:
        n / 2^rounds slots per head, u and m scaled by 2^rounds.

    Raises:
        InputError: ``rounds`` out of range, or n not a multiple of 2^rounds.
        PeerError: their code is missing or another version.
    """
    folder.check_rounds(keys, rounds, even=True)
    halve = folder.load(*_WHERE)
    # Their layout is [batch, bucket, token, head, dim], and keys carry sqrt(scale) each.
    root = keys.shape[-1] ** -0.25
    key, value = (keys * root).transpose(1, 2)[:, None], values.transpose(1, 2)[:, None]
    shift = key.square().sum(-1).amax(2)[..., None, None]  # largest <k, k'> there can be
    bound = value.abs().amax((2, 4))[..., None, None].square()
    with torch.random.fork_rng(devices=[]):  # they draw from torch's global generator
        torch.manual_seed(seed)
        for _ in range(rounds):
            n = key.shape[2]
            key, value = halve(key, value, shift, bound, delta / rounds / n**2, symmetrize=True)
    kept = Slots(key[:, 0].transpose(1, 2) / root, value[:, 0].transpose(1, 2))
    return kept.scaled(kept.masses() * 2.0**rounds)
