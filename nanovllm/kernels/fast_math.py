"""exp2, log2 and rsqrt as single GPU instructions (accuracy: PTX ISA), for Triton and Gluon kernels.

Triton's own versions are linked from CUDA's libdevice, which costs 40 ms per kernel compiled. Its `exp2` and `rsqrt`
compile to the same instructions. Its `log2` is more accurate; sampling uses it, because its noise is the logarithm of
values near 1.
"""

from __future__ import annotations

from nanovllm.kernels._triton import INTERPRETED, jit, tl

# Triton's interpreter cannot run inline assembly.
_INTERPRETED = tl.constexpr(INTERPRETED)


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
