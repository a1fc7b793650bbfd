"""Matrix products, and tile sizes (powers of two), of which some are tuned on the GPU at a call."""

from __future__ import annotations

from typing import Any

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


def tuned(kernel: Any, key: list[str], *choices: dict[str, int]) -> Any:
    """``triton.autotune`` over tile sizes, ``warps`` and ``stages``, or ``kernel`` itself in the
    interpreter.

    Choices that cannot fit are left out, because their compilation alone may take a minute. The
    first choice should be the smallest."""
    if interpreted():
        return kernel
    return triton.autotune(
        [
            triton.Config(
                {name: size for name, size in choice.items() if name.isupper()},
                num_warps=choice["warps"],
                num_stages=choice["stages"],
            )
            for choice in choices
        ],
        key=key,
        prune_configs_by={"early_config_prune": _fitting},
    )(kernel)


def _fitting(configs: list[Any], named: dict[str, Any], **constants: Any) -> list[Any]:
    width = sum(constants.get(name, 0) for name in ("HEAD_BLOCK", "VALUE_BLOCK", "WIDTH"))
    size = next(iter(named.values())).element_size() * width  # of the kernel's first argument

    def fits(config: Any) -> bool:
        sizes: dict[str, int] = config.kwargs
        rows, block = sizes.get("ROWS", 16), sizes.get("BLOCK", 16)
        shared = config.num_stages * block * size + rows * size // 2
        few = rows <= max(16, constants.get("MOST_ROWS", rows))
        return bool(few and shared <= _SHARED and rows * size <= _HELD)

    return [config for config in configs if fits(config)] or configs[:1]
