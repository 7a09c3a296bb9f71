"""Rows of a product in e4m3, each with a scale, or with one for each group of inputs (dynamic quantisation, A8).

The largest value of a row or group becomes 448. A row that a norm or an activation makes is rounded to its own dtype
first, so that it makes no difference whether both are one kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from nanovllm.kernels._triton import converts_e4m3, jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.e4m3 import quantize, round_rows
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.gates import silu_and_mul_ref
from nanovllm.kernels.rms_norm import Norm, norm_dtype, rms_norm_ref

_MM_ROWS = 4
"""Of what `torch._scaled_mm` takes, rows are a multiple of this: it reads 16 bytes of scales at a time."""


class Fp8Rows(NamedTuple):
    """Rows in e4m3.

    Attributes:
        values: [num_rows, in_features], float8_e4m3fn.
        scales: [num_rows, in_features / group], rounded up, float32.
        group: inputs that share a scale.
        num_rows: rows without the padding at the end, which may have any values.
        dtype: of the rows before they were rounded, and of a product with them.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    num_rows: int
    dtype: torch.dtype

    def part(self, rows: slice) -> Fp8Rows:
        """Return some of the rows."""
        count = len(range(self.num_rows)[rows])
        return Fp8Rows(self.values[rows], self.scales[rows], self.group, count, self.dtype)


class Rounding(NamedTuple):
    """The form in which a product takes rows in e4m3.

    Attributes:
        group: inputs that share a scale: all of a row, or a power of two.
        for_scaled_mm: as `torch._scaled_mm` takes them: scales of a group lie together, and rows are padded to a
            multiple of 4.
    """

    group: int
    for_scaled_mm: bool = False

    def empty_rows(self, num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Fp8Rows:
        """Return rows of a dtype, rounded, to be filled."""
        made_rows = num_rows + -num_rows % _MM_ROWS if self.for_scaled_mm else num_rows
        values = torch.empty(made_rows, size, dtype=torch.float8_e4m3fn, device=device)
        num_groups = -(-size // self.group)
        shape = (num_groups, made_rows) if self.for_scaled_mm else (made_rows, num_groups)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        return Fp8Rows(values, scales.T if self.for_scaled_mm else scales, self.group, num_rows, dtype)


def quantize_rows_ref(
    x: torch.Tensor, rounding: Rounding, norm: Norm | None = None, residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:  # fmt: skip
    """Plain torch form of `quantize_rows`."""
    total = x
    if norm is not None:
        x, total = rms_norm_ref(x, norm.weight, norm.eps, residual)
    if gated:
        x = silu_and_mul_ref(x)
    num_rows = len(x)
    if rounding.for_scaled_mm:
        x = functional.pad(x, (0, 0, 0, -num_rows % _MM_ROWS))
    values, scales, _, _ = quantize(x, 1, rounding.group)
    scales = scales.T.contiguous().T if rounding.for_scaled_mm else scales
    return Fp8Rows(values, scales, rounding.group, num_rows, x.dtype), total


@jit
def store_rounded(x, out_ptr, scale_ptr, first_group, size, scale_group_stride, NATIVE: tl.constexpr):
    """Round groups of a row, [groups, group] float32, zero beyond its end; store them from its first place on."""
    GROUP: tl.constexpr = x.shape[1]
    rounded, scales = round_rows(x, NATIVE)
    numbers = first_group + tl.arange(0, x.shape[0])
    offsets = numbers[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + offsets, rounded, mask=offsets < size)
    mask = numbers < tl.cdiv(size, GROUP)
    tl.store(scale_ptr + numbers.to(tl.int64) * scale_group_stride, scales, mask=mask)


@jit
def _quantize_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, total_ptr, eps, size, x_stride, part_stride,
    scale_row_stride, scale_group_stride,
    PARTS: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A row, or without a norm one of its groups.
    row, first_group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    groups = first_group + tl.arange(0, GROUPS)[:, None]
    offsets = groups * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < size
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row * x_stride + offsets, mask=mask, other=0.0)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None or PARTS > 1:
        x = round_to(x, dtype)
        tl.store(total_ptr + row * size + offsets, x.to(dtype), mask=mask)
    if weight_ptr is not None:
        mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / size
        x = round_to(x * rsqrt(mean + eps) * weight, dtype)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + size + offsets, mask=mask, other=0.0).to(tl.float32)
        x = round_to(x / (1 + tl.exp(-x)) * up, dtype)
    store_rounded(
        x, out_ptr + row * size, scale_ptr + row * scale_row_stride, first_group, size, scale_group_stride, NATIVE
    )


def quantize_rows(
    x: torch.Tensor, rounding: Rounding, norm: Norm | None = None, residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:  # fmt: skip
    """Return x, or RMSNorm(x + residual), or SiLU(gate) * up, in e4m3, and `x + residual`, as `rms_norm` does.

    x: [num_rows, size], or with a norm the parts of a sum, [num_parts, num_rows, size], or if gated, without a norm,
    [num_rows, 2 * size], gate and up; residual: [num_rows, size], or None for zero, only with a norm.
    """
    if not uses_triton(x.device):
        return quantize_rows_ref(x, rounding, norm, residual, gated)
    num_rows, size = x.shape[-2], x.shape[-1] // 2 if gated else x.shape[-1]
    parts, dtype = (1, x.dtype) if norm is None or x.dim() == 2 else (len(x), norm_dtype(x, norm, residual))
    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous()) and not (gated and norm is not None)
    rows = rounding.empty_rows(num_rows, size, dtype, x.device)
    total = x
    if residual is not None or parts > 1:
        total = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    width, num_groups = triton.next_power_of_2(rounding.group), -(-size // rounding.group)
    # A norm takes the whole row; without one a program has some 1024 elements.
    groups = triton.next_power_of_2(num_groups if norm is not None else min(num_groups, max(1, 1024 // width)))
    _quantize_rows_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        x, residual, None if norm is None else norm.weight, rows.values.view(torch.uint8), rows.scales, total,
        0.0 if norm is None else norm.eps, size, x.stride(-2), x.stride(0), rows.scales.stride(0),
        rows.scales.stride(1),
        PARTS=parts, GATED=gated, GROUPS=groups, GROUP=width, NATIVE=converts_e4m3(x.device),
        num_warps=min(16 if gated else 8, max(1, groups * width // 512)), **pdl_options(x.device),
    )  # fmt: skip
    return rows, total
