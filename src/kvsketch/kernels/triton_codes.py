"""Codes in 8 or 4 bits as float16, four bytes at a time.

A conversion of each code by itself takes about five instructions, and then arithmetic, not memory,
limits attention over few bits. Here a code becomes the low bits of 1024 in float16, which is then
subtracted, and with it the code of 0: one instruction for a code of 8 bits, and one and a half for
4 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.kernels.triton_support import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def whole(codes: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """uint8 minus 128, in float16, or in float32 if ``WIDE``, exactly."""
    if WIDE:
        found = codes.to(tl.float32) - 128.0
    elif _INTERPRETED:
        found = codes.to(tl.float16) - 128.0
    else:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, m;
            mov.b32 c, 0x64646464;
            mov.b32 m, 0x64806480;
            prmt.b32 a, $2, c, 0x4140;
            prmt.b32 b, $2, c, 0x4342;
            sub.rn.f16x2 $0, a, m;
            sub.rn.f16x2 $1, b, m;
            }""",
            "=&r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return found


@triton.jit
def halves(codes: tl.tensor, WIDE: tl.constexpr) -> tl.tuple:
    """The lower and the upper four bits of uint8, minus 8, as in ``whole``."""
    if WIDE:
        lower = (codes & 15).to(tl.float32) - 8.0
        upper = (codes >> 4).to(tl.float32) - 8.0
    elif _INTERPRETED:
        lower = (codes & 15).to(tl.float16) - 8.0
        upper = (codes >> 4).to(tl.float16) - 8.0
    else:
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m, z;
            mov.b32 m, 0x64006400;
            mov.b32 z, 0x64086408;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000f000f, m, 0xea;
            lop3.b32 $1, b, 0x000f000f, m, 0xea;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $2, a, 0x000f000f, m, 0xea;
            lop3.b32 $3, b, 0x000f000f, m, 0xea;
            sub.rn.f16x2 $0, $0, z;
            sub.rn.f16x2 $1, $1, z;
            sub.rn.f16x2 $2, $2, z;
            sub.rn.f16x2 $3, $3, z;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return lower, upper
