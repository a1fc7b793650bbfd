"""Kernel thinning (Dwivedi and Mackey 2021) of keys and values by goodpoints (Microsoft)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.peers.exchange import PeerError, call, missing
from benchmarks.peers.folder import check_rounds
from kvsketch import Slots

_RUNNER = Path(__file__).with_name("goodpoints_runner.py")


def available() -> str | None:
    """None if goodpoints can be run, else what is missing or wrong."""
    return missing("goodpoints")


def halved(keys: Tensor, values: Tensor, rounds: int, seed: int = 0) -> Slots:
    """Their ``kt.thin`` (KT-SPLIT and KT-SWAP) with attention's kernel, per head.

    Args:
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        values: ``[batch, num_key_value_heads, n, value_dim]``.
        rounds: the number of halvings, >= 1, with n >= 2^rounds. The time grows with n^2 and is
            seconds for n = 1,000.

    Returns:
        n // 2^rounds slots per head, with u and m scaled by n over this number.

    Raises:
        InputError: ``rounds`` is out of range.
        PeerError: goodpoints is missing, has another version, or failed.
    """
    check_rounds(keys, rounds)
    reason = available()
    if reason is not None:
        raise PeerError(reason)
    request = {"rounds": rounds, "seed": seed}
    index = call(_RUNNER, {"keys": keys, "values": values}, request)["kept"].to(keys.device)
    kept = Slots(keys, values).take(index)
    return kept.scaled(kept.masses() * (keys.shape[2] / index.shape[2]))
