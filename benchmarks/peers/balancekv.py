"""The BalanceKV authors' own self-balancing walk.

KVSKETCH_BALANCEKV names a checkout of their repository, github.com/ksheth96/BalanceKV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers import folder
from kvsketch import Slots

VARIABLE = "KVSKETCH_BALANCEKV"
_WHERE = (
    VARIABLE,
    "src/balanced_walk.py",
    "balanced_walk",
    ("key", "rng", "gamma_", "temp_", "beta_", "itrs", "block_size", "value"),
)


def available() -> str | None:
    """None if their code can be run, else what is missing or wrong."""
    return folder.missing(*_WHERE)


def halved(
    keys: Tensor,
    values: Tensor,
    rounds: int,
    seed: int = 0,
    *,
    gamma: float = 4.0,
    temp: float = 1.0,
    beta: float = 0.0,
    block_size: int = 256,
) -> Slots:
    """Their ``balanced_walk``, with the defaults of their LongBench script. The script has
    no default block size, so it is the paper's.

    Args:
        keys: float ``[batch, num_key_value_heads, n, head_dim]``, without sinks and recent tokens.
        values: ``[batch, num_key_value_heads, n, value_dim]``.
        rounds: the number of halvings, >= 1, with n >= 2^rounds.

    Returns:
        The kept tokens in their original order, n halved ``rounds`` times (rounding down), as the
        authors' model attends to them: u = weight * v with the weights that their code returns
        (2^rounds, except for tokens after the walk was cut at n/2), and m = 2^rounds for all.

    Raises:
        InputError: ``rounds`` is out of range.
        PeerError: their code is missing or has another version.
    """
    folder.check_rounds(keys, rounds)
    walk = folder.load(*_WHERE)
    generator = torch.Generator(keys.device).manual_seed(seed)
    index, weights = walk(keys, generator, gamma, temp, beta, rounds, block_size, value=values)
    index, order = index.sort(dim=-1)
    weights = weights.gather(-1, order).to(values.dtype)
    kept = Slots(keys, values).take(index)
    mass = torch.full_like(kept.masses(), 2.0**rounds)
    return Slots(kept.keys, kept.values * weights.unsqueeze(-1), mass)
