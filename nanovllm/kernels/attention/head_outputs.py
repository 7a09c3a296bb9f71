"""Attention output buffers: 16-bit, or e4m3 with one scale per head where the next linear layer takes e4m3."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from nanovllm.kernels._triton import converts_e4m3, jit, tl
from nanovllm.kernels.e4m3 import round_rows
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.linear.quantize_rows import Fp8Rows

HeadOutputs: TypeAlias = torch.Tensor | Fp8Rows
"""[num_rows, num_heads, value_size], contiguous; or rows of num_heads * value_size elements, each head a group."""


def rows_of(out: HeadOutputs, rows: slice) -> HeadOutputs:
    """Return some rows of the outputs."""
    return out.part(rows) if isinstance(out, Fp8Rows) else out[rows]


def pointer(out: HeadOutputs) -> torch.Tensor:
    """Return the outputs as kernels take them, e4m3 as uint8."""
    return out.values.view(torch.uint8) if isinstance(out, Fp8Rows) else out


def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def scaling(out: HeadOutputs) -> dict[str, Any]:
    """Return where kernels store the scales, as their arguments; none if outputs are not rounded."""
    if not isinstance(out, Fp8Rows):
        return {}
    row_stride, head_stride = out.scales.stride()
    return {
        "out_scale_ptr": out.scales,
        "out_scale_row_stride": row_stride,
        "out_scale_head_stride": head_stride,
        "OUT_NATIVE": converts_e4m3(out.scales.device),
    }


@jit
def store_outputs(
    out, out_ptr, places, mask, scale_ptr, scale_places, scale_mask, dtype: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Store outputs, [heads or rows, VALUE_PADDED] float32; with scales rounded to `dtype`, then to e4m3."""
    if scale_ptr is None:
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        rounded, scales = round_rows(round_to(out, dtype), NATIVE)
        tl.store(out_ptr + places, rounded, mask=mask)
        tl.store(scale_ptr + scale_places, scales, mask=scale_mask)
