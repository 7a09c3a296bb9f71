"""Powers, logarithms and roots by the GPU's own instructions (accuracy: PTX ISA); for Triton and for Gluon.

Triton takes its own from CUDA's library of device functions. To link that into a kernel takes 40 ms, and half of the
kernels of a first start would need it. Its `exp2` and `rsqrt` come to the same instructions; its `log2` is more exact,
which sums of weights do not need. Sampling does, whose noise is a logarithm of what is near 1: it keeps Triton's.
"""

from __future__ import annotations

from nanovllm.kernels._triton import INTERPRETED, jit, tl

# Triton's interpreter knows no instructions of the GPU's.
_INTERPRETED = tl.constexpr(INTERPRETED)


@jit
def exp2(x):
    """2 to the power of x, float32; subnormal results are 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def log2(x):
    """Base 2 logarithm of x, float32; off by at most 2^-22 for x of 0.5 to 2, and a 2^-22th of itself elsewhere."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def rsqrt(x):
    """1 / sqrt(x), float32; off by a 2^-22th of itself at most."""
    if _INTERPRETED:
        return tl.rsqrt(x)
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
