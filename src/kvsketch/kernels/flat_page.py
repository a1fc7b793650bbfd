"""The flat page: the slots of all heads of a row, one head after another.

Heads of different sizes need no padding in it: head h of row b owns slots ``start .. start + count
- 1`` of its row. Values are means v = u / m, so that a mass only adds log m to the scores:

    z(q) = sum_s m_s exp(<q, k_s> scaling) v_s / sum_s m_s exp(<q, k_s> scaling)

This file is plain torch. It checks the arguments of the kernels before anything is launched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.page.quantized import Quantized

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
#: The widest head of which a tile still fits into a GPU's shared memory.
_WIDEST = 1024
# Numbers of slots are int32 in the kernels, with room for sums of two; offsets are int64.
_LONGEST = 2**30


#: Keys or values of a flat page, ``[batch, total, dim]``, or in few bits with these axes.
Page = Tensor | Quantized


@dataclass(frozen=True)
class Sizes:
    """The sizes of a launch."""

    batch: int
    heads: int
    queries: int
    head_dim: int
    value_dim: int
    kv_heads: int
    total: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def check(
    queries: Tensor,
    keys: Page,
    values: Page,
    log_mass: Tensor | None,
    start: Tensor,
    count: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    positions: Tensor | None,
    pages: Tensor | None = None,
) -> Sizes:
    """Check the arguments of a kernel and return the sizes of the launch.

    Only shapes, dtypes and devices are checked: ``start`` and ``count`` stay on the device.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
        UnsupportedError: float64, gradients, heads wider than 1,024, or more than 2^30 slots.
    """
    if queries.dim() != 4:
        raise InputError(
            f"queries must be [batch, num_attention_heads, q, head_dim], got {tuple(queries.shape)}"
        )
    batch, heads, number, head_dim = queries.shape
    rows = batch if pages is None else keys.shape[0]
    for name, page in (("keys", keys), ("values", values)):
        if len(page.shape) != 3 or page.shape[0] != rows:
            raise InputError(
                f"{name} must be [batch, total, dim] with batch={rows} as in queries, got "
                f"{tuple(page.shape)}"
            )
        if pages is not None and isinstance(page, Quantized):
            raise UnsupportedError(f"{name} are quantised, which pages of their own cannot be")
    total, value_dim = values.shape[1], values.shape[2]
    if keys.shape[1] != total or keys.shape[2] != head_dim:
        raise InputError(
            f"keys {tuple(keys.shape)} must have the total of values {tuple(values.shape)} and the "
            f"head_dim of queries {tuple(queries.shape)}"
        )
    if start.dim() != 2 or start.shape[0] != batch or start.shape != count.shape:
        raise InputError(
            f"start and count must be [batch, num_key_value_heads], got {tuple(start.shape)} and "
            f"{tuple(count.shape)} for batch={batch}"
        )
    kv_heads = start.shape[1]
    for name, given in (("start", start), ("count", count)):
        if given.dtype not in _INTEGERS:
            raise InputError(f"{name} must be int32 or int64, got {given.dtype}")
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise InputError(
            f"num_attention_heads={heads} must be a multiple (>= 1) of num_key_value_heads="
            f"{kv_heads}"
        )
    if min(head_dim, value_dim) < 1:
        raise InputError(f"head_dim={head_dim} and value_dim={value_dim} must be at least 1")
    if max(head_dim, value_dim) > _WIDEST:
        raise UnsupportedError(
            f"head_dim={head_dim} and value_dim={value_dim}: the kernels take at most {_WIDEST}"
        )
    if total > _LONGEST:
        raise UnsupportedError(f"total={total}: the kernels take at most 2^30 slots per row")
    _check_page("keys", keys, kv_heads)
    _check_page("values", values, kv_heads)
    check_dtype("queries", queries)
    sizes = Sizes(batch, heads, number, head_dim, value_dim, kv_heads, total)
    check_column("log_mass", log_mass, (rows, total), (torch.float32,))
    check_column("positions", positions, (rows, total), (torch.float32, *_INTEGERS))
    check_column("pages", pages, (batch,), _INTEGERS)
    check_column("sinks", sinks, (heads,), DTYPES)
    check_column("slopes", slopes, (heads,), DTYPES)
    if slopes is not None and positions is None:
        raise InputError("slopes (ALiBi) need positions")
    if not math.isfinite(scaling):
        raise InputError(f"scaling={scaling!r} must be a finite number")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise InputError(f"softcap={softcap!r} must be a finite number > 0, or None")
    data = [t for page in (keys, values) for t in _tensors(page)]
    check_together(queries, *data, log_mass, start, count, sinks, slopes, positions, pages)
    return sizes


def check_new(
    sizes: Sizes, queries: Tensor, keys: Tensor, values: Tensor, log_mass: Tensor | None
) -> None:
    """Raises:
    InputError: new keys, values or log masses that do not fit.
    """
    shape = (sizes.batch, sizes.kv_heads, sizes.queries)
    for name, new, dim in (
        ("new_keys", keys, sizes.head_dim),
        ("new_values", values, sizes.value_dim),
    ):
        if tuple(new.shape) != (*shape, dim):
            raise InputError(f"{name} must have shape {(*shape, dim)}, got {tuple(new.shape)}")
        check_dtype(name, new)
    check_column("new_log_mass", log_mass, shape, (torch.float32,))
    check_together(queries, keys, values, log_mass)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raises:
    UnsupportedError: float64, which only the plain torch form supports.
    InputError: a dtype that is not a floating point dtype of the kernels.
    """
    if tensor.dtype == torch.float64:
        raise UnsupportedError(
            f"{name} is float64: the kernels compute in float32, kvsketch.attend in float64"
        )
    if tensor.dtype not in DTYPES:
        raise InputError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def check_column(
    name: str,
    column: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raises:
    InputError: ``column`` is given and has another shape or dtype.
    """
    if column is None:
        return
    if tuple(column.shape) != shape:
        raise InputError(f"{name} must have shape {shape}, got {tuple(column.shape)}")
    if column.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{name} must be {allowed}, got {column.dtype}")


def check_together(*tensors: Tensor | None) -> None:
    """Raises:
    InputError: tensors on different devices.
    UnsupportedError: one of them requires a gradient, which no kernel computes.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    devices = {str(tensor.device) for tensor in given}
    if len(devices) > 1:
        raise InputError(f"all tensors must be on one device, got {', '.join(sorted(devices))}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise UnsupportedError(
            "the Triton kernels have no backward pass: use torch.no_grad() or kvsketch.attend"
        )


def check_block(name: str, block: int | None) -> None:
    """Raises:
    InputError: ``block`` is given and not a power of two >= 16, as the size of a tile must be.
    """
    if block is not None and (block < 16 or block & (block - 1)):
        raise InputError(f"{name}={block!r} must be a power of two >= 16")


def given(
    name: str, given: Tensor | None, queries: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """``given``, or a new tensor if it is None.

    Raises:
        InputError: it has another shape, dtype or device.
    """
    if given is None:
        return torch.empty(shape, dtype=dtype, device=queries.device)
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise InputError(f"{name} must be {dtype} {shape}, got {given.dtype} {tuple(given.shape)}")
    check_together(queries, given)
    return given


def _check_page(name: str, page: Page, kv_heads: int) -> None:
    if isinstance(page, Tensor):
        check_dtype(name, page)
        return
    if page.bits not in (8, 4):
        raise InputError(f"{name}.bits={page.bits!r} must be 8 or 4")
    rows, total = page.shape[:2]
    codes, step, channels = page.codes, page.step, page.channels
    if codes.dtype != torch.uint8:
        raise InputError(f"{name}.codes must be uint8 [batch, total, bytes], got {codes.dtype}")
    if step.dim() != 3 or step.shape[:2] != (rows, total):
        raise InputError(
            f"{name}.step must be [batch, total, groups] with the batch and total of its codes "
            f"{(rows, total)}, got {tuple(step.shape)}"
        )
    if step.dtype not in (torch.float16, torch.float32):
        raise InputError(f"{name}.step must be float16 or float32, got {step.dtype}")
    if step.shape[2] == 0 or channels % step.shape[2]:
        raise InputError(
            f"{channels} channels of {name}.codes do not divide into the groups of its step "
            f"{tuple(step.shape)}"
        )
    if not 0 < page.dim <= channels:
        raise InputError(f"{name}.dim={page.dim} must be in 1 .. {channels}, the channels of codes")
    if name == "values" and page.offset is not None:
        raise InputError("values.offset must be None: quantised values have no centre")
    for part, given, widths in (
        ("unit", page.unit, (1, page.dim)),
        ("offset", page.offset, (page.dim,)),
    ):
        if given is None:
            continue
        if given.shape[:3] != (rows, kv_heads, 1) or given.shape[3:] not in [(w,) for w in widths]:
            raise InputError(
                f"{name}.{part} must be [batch, num_key_value_heads, 1, dim] = "
                f"{(rows, kv_heads, 1, page.dim)}, got {tuple(given.shape)}"
            )
        if given.dtype != torch.float32:
            raise InputError(f"{name}.{part} must be float32, got {given.dtype}")


def _tensors(page: Page) -> list[Tensor]:
    return [page] if isinstance(page, Tensor) else page.tensors()
