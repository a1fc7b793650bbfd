"""TriAttention (Mao et al. 2026, arXiv:2604.04921), by the authors' own code.

KVSKETCH_TRIATTENTION names a checkout of their repository, github.com/WeianMao/triattention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import folder

VARIABLE = "KVSKETCH_TRIATTENTION"
_WHERE = (
    VARIABLE,
    "triattention/methods/triattention.py",
    "TriAttention",
    ("config",),
)


def available() -> str | None:
    """None if their code can be run, else what is missing or wrong."""
    return folder.missing(*_WHERE)


def kept(
    before: Tensor,
    keys: Tensor,
    count: int,
    rotary: nn.Module,
    *,
    farthest: int = 65536,
    aggregation: str = "mean",
) -> Tensor:
    """The tokens that their class keeps with ``per_layer_perhead_pruning``, standardised scores and
    no noise, after statistics that are computed from given queries as their calibration does.

    Args:
        before: queries before RoPE, float ``[batch, num_attention_heads, q, head_dim]``.
        keys: after RoPE at positions 0 to n - 1, ``[batch, num_key_value_heads, n, head_dim]``.
        count: tokens to keep.
        rotary: the model's rotary embedding, which rotates channels i and i + head_dim / 2.

    Returns:
        int64 ``[batch, num_key_value_heads, count]``, ascending.

    Raises:
        PeerError: their code is missing or has another version.
    """
    offsets = _helper("build_geometric_offsets")(farthest, keys.device)
    found = []
    for row in range(len(keys)):
        made = object.__new__(folder.load(*_WHERE))  # theirs reads a model and a file
        made.__dict__.update(_settings(before[row], keys.shape, rotary))
        made.score_aggregation, made.offsets = aggregation, offsets
        layers = ((keys[row : row + 1], None),)
        places = torch.arange(keys.shape[2])
        chosen = made._select_per_layer_perhead_independent(layers, count, 0, places)
        found.append(chosen[0].sort(-1).values)
    return torch.stack(found)


def _helper(name: str) -> Callable[..., Any]:
    return folder.load(VARIABLE, "triattention/methods/pruning_utils.py", name, ())


def _settings(before: Tensor, shape: torch.Size, rotary: nn.Module) -> dict[str, Any]:
    """The attributes of their object for one layer."""
    heads, kv_heads, (n, dim) = len(before), shape[1], shape[2:]
    settings = SimpleNamespace(device=before.device, dtype=before.dtype)
    settings.layer_perhead_aggregation = "max"
    stats = {}
    for head in range(heads):
        pairs = _helper("to_complex_pairs")(before[head])
        made = _helper("HeadFrequencyStats")(pairs.mean(0), pairs.abs().mean(0))
        stats[0, head] = made
    scale = _helper("compute_frequency_scaling")(rotary, dim, before.dtype, before.device)
    return {
        "config": settings,
        "sampled_heads": list(stats),
        "head_stats": stats,
        "rotary": rotary,
        "rope_style": "half",
        "attention_scale": rotary.attention_scaling,
        "head_dim": dim,
        "omega": rotary.inv_freq,
        "freq_scale_sq": scale.square(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
        "cache_positions_per_layer_perhead": None,
        "absolute_position": n,
        "normalize_scores": True,
        "generator": None,
        "disable_mlr": False,
        "disable_trig": False,
    }
