"""transformers' own ``QuantizedCache`` with its quanto backend: why not just quantise?"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.peers.exchange import PeerError, call, missing
from kvsketch import InputError

_RUNNER = Path(__file__).with_name("quantized_cache_runner.py")
_BACKEND = "optimum-quanto"

#: what the backend takes
ALLOWED_BITS = (4, 2)


def available(bits: int = 4) -> str | None:
    """None where the cache can be run in so many bits; else what is missing or wrong."""
    if bits not in ALLOWED_BITS:
        return f"bits={bits!r}: QuantizedCache with quanto has {ALLOWED_BITS} only"
    return missing(_BACKEND) or missing("torch")


def roundtrip(
    keys: Tensor, values: Tensor, bits: int, *, per_channel: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Keys and values as attention sees them once the cache has quantised them: the whole of what
    is given, so leave out what would be in its residual window. Once: the real cache quantises all
    of it anew whenever that window is full.

    Args:
        keys: float32 or bfloat16 ``[batch, num_key_value_heads, n, head_dim]``; scales and zero
            points take their dtype. ``batch * heads * n * head_dim`` a multiple of 64.
        values: likewise.
        bits: 4 or 2.
        per_channel: keys in groups of 64 slots of one channel (``axis_key=-1``), as KIVI has it;
            ``batch * heads * n`` must be a multiple of 64. Default, as in transformers: groups of
            64 neighbouring channels.

    Returns:
        Keys and values in the dtype given, and the bytes of the packed tensors with their scales
        and zero points.

    Raises:
        InputError: bits or shapes that the backend does not have.
        PeerError: transformers or quanto is missing, of another version, or failed.
    """
    if bits not in ALLOWED_BITS:
        raise InputError(f"bits={bits!r} must be one of {ALLOWED_BITS}")
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise InputError(
            "keys and values must be [batch, num_key_value_heads, n, dim], got "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    slots = keys.shape[:3].numel()
    for name, count in (
        ("keys", slots if per_channel else keys.numel()),
        ("values", values.numel()),
    ):
        if count == 0 or count % 64:
            raise InputError(
                f"{name} {tuple(keys.shape if name == 'keys' else values.shape)} have groups over "
                f"{count} numbers, which must be a multiple of 64 and not 0"
            )
    reason = available(bits)
    if reason is not None:
        raise PeerError(reason)
    request = {"bits": bits, "axis_key": -1 if per_channel else 0}
    out = call(_RUNNER, {"keys": keys, "values": values}, request)
    return out["keys"].to(keys.device), out["values"].to(values.device), int(out["bytes"])
