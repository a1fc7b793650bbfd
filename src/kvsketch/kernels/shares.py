"""The largest share of attention that queries after a context give its tokens."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kvsketch.kernels import native, triton_support
from kvsketch.observed import Observed
from kvsketch.pieces import at_once
from kvsketch.slots import compute_dtype

# Scores that torch computes at a time, 4 MB in float32, and the least number of queries.
_SCORES, _QUERIES = 1 << 20, 64


def largest_shares(asked: Observed, keys: Tensor, mass: Tensor | None = None) -> Tensor:
    """The largest share of its attention that any query, of any query head of the group, gives a
    key.

    Args:
        asked: queries ``[batch, num_attention_heads, q, head_dim]`` after all keys. Scores are
            scaled products alone, see ``reread.fits``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        mass: of their slots, ``[batch, num_key_value_heads, n]``, at least one of them > 0 in every
            head; not on a GPU. None: 1 each.

    Returns:
        ``[batch, num_key_value_heads, n]``, in at least float32.
    """
    batch, kv_heads, n, dim = keys.shape
    rows, dtype = batch * kv_heads, compute_dtype(keys.dtype)
    if triton_support.chosen(keys):
        from kvsketch.kernels.triton_shares import largest_shares as by_triton

        queries = asked.queries.reshape(rows, -1, dim).to(keys.dtype)
        found = by_triton(queries, keys.reshape(rows, n, dim), asked.scaling)
        return found.exp_().view(batch, kv_heads, n)
    queries = asked.queries.reshape(rows, -1, dim).to(dtype)
    flat = keys.reshape(rows, n, dim).to(dtype)
    compiled = flat.device.type == "cpu" and dtype == torch.float32
    way = _compiled if compiled and native.library() is not None else _by_torch
    log_mass = None if mass is None else mass.reshape(rows, n).to(dtype).log()
    return way(queries, flat, log_mass, asked.scaling).exp_().view(batch, kv_heads, n)


def _by_torch(queries: Tensor, keys: Tensor, log_mass: Tensor | None, scaling: float) -> Tensor:
    """Logs of the shares, ``[rows, n]``, of ``[rows, q, head_dim]`` and ``[rows, n, head_dim]``."""
    rows, n, _ = keys.shape
    across, found = keys.mT, keys.new_full((rows, n), -torch.inf)
    few = max(_QUERIES, at_once(keys, _SCORES) // (rows * n))
    for start in range(0, queries.shape[1], few):
        scores = queries[:, start : start + few] @ across * scaling
        if log_mass is not None:
            scores += log_mass.unsqueeze(1)
        scores -= scores.logsumexp(-1, keepdim=True)
        torch.maximum(found, scores.amax(1), out=found)
    return found


def _compiled(queries: Tensor, keys: Tensor, log_mass: Tensor | None, scaling: float) -> Tensor:
    library = native.library()
    assert library is not None
    queries, keys = queries.contiguous(), keys.contiguous()
    log_mass = None if log_mass is None else log_mass.contiguous()
    found = keys.new_empty(keys.shape[:2])
    sizes = keys.shape[0], queries.shape[1], *keys.shape[1:]
    given = (queries, keys, log_mass, found)
    addresses = (0 if t is None else t.data_ptr() for t in given)
    (bits,) = struct.unpack("q", struct.pack("d", scaling))
    # ``Shares`` of shares.h; the last number is its counter.
    library.kvsketch_share((ctypes.c_int64 * 10)(*addresses, *sizes, bits, 0), native.threads())
    return found
