"""Powers, logarithms and roots, as the GPU's own instructions compute them.

Triton's `exp2` and `rsqrt` are the same instructions, but out of CUDA's library of device functions. To link that into
a kernel takes 40 ms, which holds the interpreter lock, so that no other kernel gets on meanwhile; and some 20 kernels
are compiled at a first start.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl, triton

# Triton's interpreter knows no instructions of the GPU's.
_INTERPRETED = tl.constexpr(hasattr(triton, "knobs") and triton.knobs.runtime.interpret)


@jit
def exp2(x):
    """2 to the power of x, float32; subnormal results are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def log2(x):
    """Base 2 logarithm of x, float32, to within 2^-22."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def rsqrt(x):
    """1 / sqrt(x), float32, to within 2^-22 of it."""
    if _INTERPRETED:
        return tl.rsqrt(x)
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
