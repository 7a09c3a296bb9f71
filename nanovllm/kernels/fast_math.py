"""exp2, log2, rsqrt, tanh and rounding by single GPU instructions (accuracy: PTX ISA), for Triton and Gluon kernels.

Triton's own versions are linked from CUDA's libdevice, which costs 40 ms per kernel compiled. Its logarithm is more
accurate; sampling uses it, because its noise is the logarithm of values near 1.
"""

from __future__ import annotations

from nanovllm.kernels._triton import INTERPRETED as _INTERPRETED
from nanovllm.kernels._triton import jit, tl


@jit
def exp2(x):
    """Return 2 ** x in float32; subnormal results are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def log2(x):
    """Return the base-2 logarithm of x in float32; absolute error up to 2^-22 for x in [0.5, 2], else relative."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def rsqrt(x):
    """Return 1 / sqrt(x) in float32; relative error up to 2^-22."""
    if _INTERPRETED:
        return tl.rsqrt(x)
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def tanh(x):
    """Return the hyperbolic tangent of x in float32; absolute error up to 2^-22."""
    return 1 - 2 / (exp2(x * 2.8853900817779268) + 1)


@jit
def round_to(x, dtype: tl.constexpr):
    """Return `x.to(dtype).to(tl.float32)` of float32 x, two elements at a time, at four times the compiler's rate."""
    # One return: what follows one in a branch is compiled, too.
    if _INTERPRETED or dtype.primitive_bitwidth == 32 or x.numel == 1:
        rounded = x.to(dtype).to(tl.float32)
    elif dtype == tl.bfloat16:
        rounded = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        rounded = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .f16 low, high;
            cvt.rn.f16x2.f32 both, $3, $2;
            mov.b32 {low, high}, both;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded


@jit
def to_float16(x):
    """Return float32 x rounded to float16, two at a time; the compiler converts former bfloat16 one by one."""
    if _INTERPRETED:
        return x.to(tl.float16)
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, is_pure=True, pack=2)


@jit
def pack_pair(first, second, dtype: tl.constexpr):
    """Return float32 values rounded to a `dtype` of two bytes, as the low and the high half of an int32."""
    if _INTERPRETED:
        low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True, pack=1
    )
