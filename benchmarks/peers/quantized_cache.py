"""transformers' own ``QuantizedCache`` with its quanto backend, an alternative to compression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.peers.exchange import PeerError, call, missing
from kvsketch import InputError

_RUNNER = Path(__file__).with_name("quantized_cache_runner.py")
_BACKEND = "optimum-quanto"

#: The numbers of bits that the backend supports.
ALLOWED_BITS = (4, 2)


def available(bits: int = 4) -> str | None:
    """None if the cache can be run with this number of bits, else what is missing or wrong."""
    if bits not in ALLOWED_BITS:
        return f"bits={bits!r}: QuantizedCache with quanto has {ALLOWED_BITS} only"
    return missing(_BACKEND) or missing("torch")


def roundtrip(
    keys: Tensor, values: Tensor, bits: int, *, per_channel: bool = False
) -> tuple[Tensor, Tensor, int]:
    """``roundtrips`` for one layer."""
    return roundtrips([(keys, values)], bits, per_channel=per_channel)[0]


def roundtrips(
    layers: Sequence[tuple[Tensor, Tensor]], bits: int, *, per_channel: bool = False
) -> list[tuple[Tensor, Tensor, int]]:
    """Keys and values as attention reads them after the cache has quantised all of them. Tokens of
    the cache's residual window, which it does not quantise, should be left out. Tokens are
    quantised once here, while the real cache quantises all of them again whenever its residual
    window is full. All layers run in one process.

    Args:
        layers: keys, float32 or bfloat16 ``[batch, num_key_value_heads, n, head_dim]``, and values
            likewise. Scales and zero points have their dtype. ``batch * heads * n * head_dim`` is a
            multiple of 64.
        bits: 4 or 2.
        per_channel: quantise keys in groups of 64 slots of one channel (``axis_key=-1``), as KIVI
            does. ``batch * heads * n`` must then be a multiple of 64. By default, as in
            transformers, groups are 64 neighbouring channels.

    Returns:
        For each layer, keys and values in the given dtype, and the bytes of the packed tensors with
        their scales and zero points.

    Raises:
        InputError: the backend does not support the bits or the shapes.
        PeerError: transformers or quanto is missing, has another version, or failed.
    """
    if bits not in ALLOWED_BITS:
        raise InputError(f"bits={bits!r} must be one of {ALLOWED_BITS}")
    tensors = {}
    for i, (keys, values) in enumerate(layers):
        _check(keys, values, per_channel)
        # Copies, because the entries of a safetensors file may not share tensors.
        tensors |= {f"keys.{i}": keys.clone(), f"values.{i}": values.clone()}
    reason = available(bits)
    if reason is not None:
        raise PeerError(reason)
    request = {"bits": bits, "axis_key": -1 if per_channel else 0, "layers": len(layers)}
    out = call(_RUNNER, tensors, request)
    return [
        (
            out[f"keys.{i}"].to(keys.device),
            out[f"values.{i}"].to(values.device),
            int(out[f"bytes.{i}"]),
        )
        for i, (keys, values) in enumerate(layers)
    ]


def _check(keys: Tensor, values: Tensor, per_channel: bool) -> None:
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise InputError(
            "keys and values must be [batch, num_key_value_heads, n, dim], got "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    slots = keys.shape[:3].numel()
    for name, tensor, count in (
        ("keys", keys, slots if per_channel else keys.numel()),
        ("values", values, values.numel()),
    ):
        if count == 0 or count % 64:
            raise InputError(
                f"{name} {tuple(tensor.shape)} have groups over {count} numbers, which must be a "
                "multiple of 64 and not 0"
            )
