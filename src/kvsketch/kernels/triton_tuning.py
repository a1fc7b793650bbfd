"""Matrix products, and tile sizes (powers of two)."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.kernels.triton_support import interpreted

# Limits of an A100, the smallest GPU considered: shared memory of a program, and bytes of
# accumulators and queries that 8 warps keep in registers.
_SHARED = 160 * 1024
_HELD = 64 * 1024

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def product(a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``tl.dot`` plus ``acc``, which may be None, in float32."""
    if _INTERPRETED:  # the interpreter reads the bits of a bfloat16 as an integer (Triton 3.9)
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)


def padded(count: int, least: int = 16) -> int:
    """The size of a tile for ``count`` rows or channels: a power of two."""
    return max(least, 1 << (count - 1).bit_length())


def fitting(width: int, size: int, rows: int, *choices: dict[str, int]) -> dict[str, int]:
    """The first of ``choices`` that fits into a multiprocessor, or the last one.

    Args:
        width: columns of a key's and a value's tile together.
        size: bytes of an element.
        rows: rows of queries of a tile, where a choice has no ``ROWS``.
        choices: tile sizes ``ROWS`` and ``BLOCK``, ``num_warps`` and ``num_stages``.
    """
    for choice in choices:
        some = choice.get("ROWS", rows)
        shared = choice["num_stages"] * choice["BLOCK"] * size * width + some * size * width // 2
        if shared <= _SHARED and some * size * width <= _HELD:
            break
    return choice
