"""The kernel halving of Thinformer's authors (Carrell et al. 2025).

KVSKETCH_THINFORMER names a checkout of their repository, github.com/microsoft/thinformer.
"""

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
    """None if their code can be run, else what is missing or wrong."""
    return folder.missing(*_WHERE)


def halved(keys: Tensor, values: Tensor, rounds: int, seed: int = 0, delta: float = 0.5) -> Slots:
    """Their ``halve``, ``rounds`` times over the whole sequence. Their attention layer halves
    buckets instead (KH-Compress), which is faster. The whole sequence is the best case for halving.

    Args:
        keys: float ``[batch, num_key_value_heads, n, head_dim]``, n a multiple of 2^rounds. The
            memory is n x n per head.
        values: ``[batch, num_key_value_heads, n, value_dim]``.
        rounds: the number of halvings, >= 1.
        delta: failure probability, split over the rounds.

    Returns:
        n / 2^rounds slots per head, with u and m scaled by 2^rounds.

    Raises:
        InputError: ``rounds`` is out of range, or n is not a multiple of 2^rounds.
        PeerError: their code is missing or has another version.
    """
    folder.check_rounds(keys, rounds, even=True)
    halve = folder.load(*_WHERE)
    # Their layout is [batch, bucket, token, head, dim], and each key is scaled by sqrt(scale).
    root = keys.shape[-1] ** -0.25
    key, value = (keys * root).transpose(1, 2)[:, None], values.transpose(1, 2)[:, None]
    shift = key.square().sum(-1).amax(2)[..., None, None]  # upper bound of <k, k'>
    bound = value.abs().amax((2, 4))[..., None, None].square()
    with torch.random.fork_rng(devices=[]):  # Their code uses torch's global generator.
        torch.manual_seed(seed)
        for _ in range(rounds):
            n = key.shape[2]
            key, value = halve(key, value, shift, bound, delta / rounds / n**2, symmetrize=True)
    kept = Slots(key[:, 0].transpose(1, 2) / root, value[:, 0].transpose(1, 2))
    return kept.scaled(kept.masses() * 2.0**rounds)
