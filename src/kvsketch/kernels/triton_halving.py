"""The self-balancing walk of BalanceKV's blocks (section 4, 2502.07861), all in one launch.

One program walks through one block of one head. Inner products are computed in panels, as in
``methods/balance.balance``: those with earlier panels by matrix products, and those within a panel
before its signs are decided one by one.

The size of a panel is tuned on a GPU at the first call. No speed has been measured on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InputError, UnsupportedError
from ..methods.balance import Lifted
from .flat_page import check_block, check_column, check_dtype, check_together
from .triton_support import LONGEST_WALK, launching, require
from .triton_tuning import padded, product, tuned

# Channels of an inner product that are read at a time.
_CHUNK = 32
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def walk(
    vectors: Lifted, threshold: float, bound: Tensor, uniform: Tensor, *, panel: int | None = None
) -> tuple[Tensor, Tensor]:
    """``methods.balance.walk`` for vectors that are ``Lifted``, computed in float32.

    The signs are those of ``walk`` with the same ``uniform``, except if rounding decides: a random
    number within about 1e-6 of the probability with which it is compared.

    Args:
        vectors: R sequences of n <= 4,096 keys and values, float32, float16 or bfloat16.
        threshold: c.
        bound: R^2 per sequence, float32 ``[R]``, or per vector ``[R, n]``.
        uniform: random numbers in [0, 1), float64 or float32 ``[R, n]``.
        panel: vectors of a panel, a power of two >= 16. None: tuned on a GPU.

    Returns:
        Signs +1 and -1, float32 ``[R, n]``, and failed, bool ``[R]``.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
        UnsupportedError: float64 keys or values, gradients, n above 4,096, tensors that are not on
            a CUDA device (outside of Triton's interpreter).
    """
    keys, values, groups = vectors.keys, vectors.values, vectors.groups
    _check(vectors, bound, uniform)
    check_block("panel", panel)
    require(keys)
    rows, n, head_dim = keys.shape
    value_dim = values.shape[2]
    signs = torch.empty(rows, n, dtype=torch.float32, device=keys.device)
    failed = torch.zeros(rows, dtype=torch.int32, device=keys.device)
    if signs.numel() == 0:
        return signs, failed.bool()
    kernel, arguments = _walk_tuned, {}
    if panel is not None or kernel is _walk:
        kernel, arguments = _walk, {"PANEL": panel or 32}
    with launching(keys):
        kernel[(rows,)](
            keys,
            keys.stride(),
            values,
            values.stride(),
            groups,
            (0, 0) if groups is None else groups.stride(),
            vectors.shift,
            vectors.shift.stride(0),
            bound,
            bound.stride() if bound.dim() == 2 else (bound.stride(0), 0),
            uniform,
            uniform.stride(),
            signs,
            failed,
            n,
            float(vectors.scaling),
            float(threshold),
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            CHUNK=_CHUNK,
            LENGTH=padded(n, panel or 64),
            enable_fp_fusion=True,
            **arguments,
        )
    return signs, failed.bool()


@triton.jit
def _products(
    tensor: tl.tensor,
    at: tl.tuple,
    row: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    n: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Inner products of two panels of keys or of values, some channels at a time, because without
    tensor cores all operands of a product are in registers."""
    found = tl.zeros([first.shape[0], second.shape[0]], tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK).to(tl.int64)
        places = tensor + row * at[0] + first[:, None] * at[1] + channel[None, :] * at[2]
        mask = (first < n)[:, None] & (channel < DIM)[None, :]
        x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        places = tensor + row * at[0] + second[:, None] * at[1] + channel[None, :] * at[2]
        mask = (second < n)[:, None] & (channel < DIM)[None, :]
        y = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        found = product(x, tl.trans(y), found, "ieee")
    return found


@triton.jit
def _inner(
    keys: tl.tensor,
    keys_at: tl.tuple,
    values: tl.tensor,
    values_at: tl.tuple,
    groups: tl.tensor,
    groups_at: tl.tuple,
    row: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    n: tl.tensor,
    scaling: tl.tensor,
    shift: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """``Lifted.inner`` of two panels."""
    scores = _products(keys, keys_at, row, first, second, n, HEAD_DIM, CHUNK)
    inner = _products(values, values_at, row, first, second, n, VALUE_DIM, CHUNK)
    inner *= tl.exp(tl.minimum(scores * scaling - shift, 60.0))
    if groups is not None:  # vectors of different groups are orthogonal
        places = groups + row * groups_at[0]
        mine = tl.load(places + first * groups_at[1], mask=first < n, other=-1)
        theirs = tl.load(places + second * groups_at[1], mask=second < n, other=-1)
        inner = tl.where(mine[:, None] == theirs[None, :], inner, 0.0)
    return inner


@triton.jit
def _walk(
    keys: tl.tensor,
    keys_at: tl.tuple,
    values: tl.tensor,
    values_at: tl.tuple,
    groups: tl.tensor,
    groups_at: tl.tuple,
    shifts: tl.tensor,
    shifts_at: tl.tensor,
    bounds: tl.tensor,
    bounds_at: tl.tuple,
    uniforms: tl.tensor,
    uniforms_at: tl.tuple,
    signs: tl.tensor,
    failed: tl.tensor,
    n: tl.tensor,
    scaling: tl.tensor,
    threshold: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LENGTH: tl.constexpr,
    PANEL: tl.constexpr,
) -> None:
    """Walk through one sequence."""
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(shifts + row * shifts_at)
    within = tl.arange(0, PANEL).to(tl.int64)
    panels = tl.arange(0, LENGTH // PANEL)
    signed = tl.zeros([LENGTH // PANEL, PANEL], tl.float32)  # the signs that were decided
    beyond = tl.zeros([PANEL], tl.int32)
    for number in range(tl.cdiv(n, PANEL)):
        index = number * PANEL + within
        there = index < n
        bound = tl.load(bounds + row * bounds_at[0] + index * bounds_at[1], mask=there, other=0.0)
        limit = tl.maximum(threshold * bound, _TINY)
        uniform = tl.load(
            uniforms + row * uniforms_at[0] + index * uniforms_at[1], mask=there, other=0.0
        )
        pending = tl.zeros([PANEL], tl.float32)
        for earlier in range(number):
            past = earlier * PANEL + within
            inner = _inner(
                keys,
                keys_at,
                values,
                values_at,
                groups,
                groups_at,
                row,
                index,
                past,
                n,
                scaling,
                shift,
                HEAD_DIM,
                VALUE_DIM,
                CHUNK,
            )
            sign = tl.sum(tl.where((panels == earlier)[:, None], signed, 0.0), axis=0)
            pending += tl.sum(inner * sign[None, :], axis=1)
        inner = _inner(
            keys,
            keys_at,
            values,
            values_at,
            groups,
            groups_at,
            row,
            index,
            index,
            n,
            scaling,
            shift,
            HEAD_DIM,
            VALUE_DIM,
            CHUNK,
        )
        decided = tl.zeros([PANEL], tl.float32)
        for step in range(PANEL):
            # A sign is computed for every vector of the panel. Only that of ``step`` is kept.
            up = uniform < (0.5 - tl.div_rn(pending, 2 * limit)).to(uniform.dtype)
            sign = tl.where(up, 1.0, -1.0)
            turn = within == step
            beyond = tl.where(turn & there & (tl.abs(pending) > limit), 1, beyond)
            decided = tl.where(turn, sign, decided)
            # The products are symmetric, so that row ``step`` has those of all others with it.
            pending += tl.sum(tl.where(turn[:, None], inner * sign[:, None], 0.0), axis=0)
        signed = tl.where((panels == number)[:, None], decided[None, :], signed)
        tl.store(signs + row * n + index, decided, mask=there)
    tl.store(failed + row, tl.max(beyond, axis=0))


_walk_tuned = tuned(
    _walk,
    ["HEAD_DIM", "VALUE_DIM", "LENGTH"],
    {"PANEL": 16, "warps": 1, "stages": 2},
    {"PANEL": 16, "warps": 2, "stages": 2},
    {"PANEL": 32, "warps": 2, "stages": 2},
    {"PANEL": 32, "warps": 4, "stages": 2},
    {"PANEL": 64, "warps": 4, "stages": 2},
    {"PANEL": 64, "warps": 8, "stages": 2},
)


def _check(vectors: Lifted, bound: Tensor, uniform: Tensor) -> None:
    keys, values, shift, groups = vectors.keys, vectors.values, vectors.shift, vectors.groups
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise InputError(
            f"keys and values must be [R, n, dim], got {tuple(keys.shape)} and "
            f"{tuple(values.shape)}"
        )
    rows, n = keys.shape[:2]
    check_dtype("keys", keys)
    check_dtype("values", values)
    check_column("shift", shift, (rows,), (torch.float32,))
    check_column("bound", bound, (rows,) if bound.dim() == 1 else (rows, n), (torch.float32,))
    check_column("uniform", uniform, (rows, n), (torch.float64, torch.float32))
    check_column("groups", groups, (rows, n), (torch.int64, torch.int32))
    check_together(keys, values, shift, groups, bound, uniform)
    if min(keys.shape[2], values.shape[2]) < 1:
        raise InputError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} have no width")
    if n > LONGEST_WALK:
        raise UnsupportedError(
            f"n={n}: the kernel takes sequences of at most {LONGEST_WALK} vectors; "
            "methods.balance.walk takes any number"
        )
