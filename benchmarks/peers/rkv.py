"""R-KV (Cai et al. 2025, arXiv:2505.24133), by the authors' own code.

KVSKETCH_RKV names a checkout of their repository, github.com/Zefan-Cai/R-KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers import folder

VARIABLE = "KVSKETCH_RKV"
_WHERE = (
    VARIABLE,
    "rkv/compression/r1_kv.py",
    "R1KV",
    ("budget", "window_size", "kernel_size", "mix_lambda", "retain_direction"),
)
# What that file imports from its package, whose first file imports others that are not there.
_BESIDE = dict.fromkeys(("cal_similarity", "compute_attention_scores"), "rkv/utils.py")


def available() -> str | None:
    """None if their code can be run, else what is missing or wrong."""
    return folder.missing(*_WHERE, _BESIDE)


def kept(
    queries: Tensor,
    keys: Tensor,
    count: int,
    *,
    window: int = 8,
    kernel_size: int = 7,
    mix: float = 0.1,
) -> Tensor:
    """The tokens that their ``R1KV.update_kv`` keeps, which takes one row at a time.

    Args:
        queries: of the last tokens, float ``[batch, num_attention_heads, q, head_dim]``, scaled by
            1 / sqrt(head_dim) by their code.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        count: tokens to keep, > ``window``.

    Returns:
        int64 ``[batch, num_key_value_heads, count]``, ascending.

    Raises:
        PeerError: their code is missing or has another version.
    """
    made = folder.load(*_WHERE, _BESIDE)(
        budget=count,
        window_size=window,
        kernel_size=kernel_size,
        mix_lambda=mix,
        retain_direction="last",
    )
    places = torch.arange(keys.shape[2], dtype=keys.dtype).view(1, 1, -1, 1).expand(keys.shape)
    found = []
    for row in range(len(keys)):
        part = slice(row, row + 1)
        found.append(made.update_kv(keys[part], queries[part], places[part])[1][..., 0])
    return torch.cat(found).long().sort(-1).values
