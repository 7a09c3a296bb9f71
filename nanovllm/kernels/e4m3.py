"""Matrices of e4m3 values (Micikevicius et al. 2022, arXiv:2209.05433) with float32 scales: rounding to them and back.

Kernels take the values as bytes, which those convert themselves whose GPU cannot, before sm_89. A NaN among the values,
which quantisation does not make, is then 480.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nanovllm.kernels._triton import INTERPRETED as _INTERPRETED
from nanovllm.kernels._triton import converts_e4m3, jit, tl, triton, uses_triton
from nanovllm.kernels.four_bits import FourBitMatrix

E4M3_MAX = 448.0
_TILE_OUTS, _TILE_INS = 32, 128


class Fp8Matrix(NamedTuple):
    """The matrix of a linear layer, or one for each expert; each value is multiplied by the scale of its block.

    Attributes:
        values: [out_features, in_features], or [num_experts, out_features, in_features]; float8_e4m3fn.
        scales: [out_features / block_outs, in_features / block_ins], rounded up, for each expert; float32.
        block_outs, block_ins: outputs and inputs of a block, which may be cut at the matrix' end.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block_outs: int
    block_ins: int

    @property
    def bytes(self) -> torch.Tensor:
        """The values as kernels take them, uint8."""
        return self.values.view(torch.uint8)

    @property
    def scaling(self) -> dict[str, Any]:
        """The scales as arguments of kernels; with `SCALE_INS` 0 an output has one, by which its sum is multiplied."""
        block_ins = self.block_ins if self.scales.shape[-1] > 1 else 0
        native = converts_e4m3(self.values.device)
        return {"scale_ptr": self.scales, "SCALE_OUTS": self.block_outs, "SCALE_INS": block_ins, "NATIVE": native}

    def outputs(self, start: int, stop: int) -> Fp8Matrix:
        """Return the matrix of outputs `start ... stop - 1`; `start` is a multiple of `block_outs`."""
        scales = self.scales[start // self.block_outs : -(-stop // self.block_outs)]
        return self._replace(values=self.values[start:stop], scales=scales)

    def expert(self, number: int) -> Fp8Matrix:
        """Return the matrix of one expert."""
        return self._replace(values=self.values[number], scales=self.scales[number])


def kernel_arguments(weight: torch.Tensor | Fp8Matrix | FourBitMatrix) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a weight's values as kernels take them, and its `scaling`, if it has any."""
    if isinstance(weight, FourBitMatrix):
        return weight.values, weight.scaling
    return (weight.bytes, weight.scaling) if isinstance(weight, Fp8Matrix) else (weight, {})


def quantize(weight: torch.Tensor, block_outs: int, block_ins: int) -> Fp8Matrix:
    """Round a matrix, [out_features, in_features], to e4m3; the largest value of each block becomes 448.

    A block with a value that is not finite has a scale that is not finite.
    """
    num_outs, num_ins = weight.shape
    padded = functional.pad(weight.float(), (0, -num_ins % block_ins, 0, -num_outs % block_outs))
    blocks = padded.unflatten(1, (-1, block_ins)).unflatten(0, (-1, block_outs))
    scales = blocks.abs().amax((1, 3)) / E4M3_MAX
    # A 448th of the smallest subnormal numbers is 0 in float32.
    scales = torch.where(scales == 0, 1.0, scales)
    values = (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Matrix(values.view(padded.shape)[:num_outs, :num_ins].contiguous(), scales, block_outs, block_ins)


def dequantize_ref(matrix: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Plain torch form of `dequantize`."""
    num_outs, num_ins = matrix.values.shape
    scales = matrix.scales.repeat_interleave(matrix.block_outs, 0)[:num_outs]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(matrix.block_ins, 1)[:, :num_ins]
    return (matrix.values.float() * scales).to(dtype)


def _from_e4m3(kind: str, shift: int, factor: str) -> str:
    """Return assembly for four bytes: exponents and mantissas `shift` bits lower in halves of registers, times this."""
    made = "prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424; "
    for i, half in enumerate(("low", "high")):
        made += f"and.b32 sign, {half}, 0x80008000; and.b32 {half}, {half}, 0x7f007f00; "
        made += f"shr.u32 {half}, {half}, {shift}; or.b32 {half}, {half}, sign; "
        made += f"fma.rn.{kind} ${i}, {half}, factor, zero; "
    consts = f"mov.b32 factor, {factor}; mov.b32 zero, 0x80008000; "
    return f"{{ .reg .b32 low, high, sign, factor, zero; {consts}{made}}}"


_TO_BF16 = tl.constexpr(_from_e4m3("bf16x2", 4, "0x7b807b80"))
_TO_F16 = tl.constexpr(_from_e4m3("f16x2", 1, "0x5c005c00"))


@jit
def from_e4m3(bytes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return bytes of e4m3 as `dtype`, bfloat16 or float16, exactly."""
    # The GPU's instruction knows float16 only, and two slow ones lead from there to bfloat16. Else bits are moved to
    # where they are in `dtype`, whose exponents have another bias: a product by a power of two corrects that.
    if NATIVE and dtype == tl.float16:
        converted = bytes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif _INTERPRETED:
        converted = bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        converted = tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [bytes], tl.bfloat16, is_pure=True, pack=4)
    else:
        converted = tl.inline_asm_elementwise(_TO_F16, "=r,=r,r", [bytes], tl.float16, is_pure=True, pack=4)
    return converted


@jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Return float32 as bytes of e4m3, to the nearest, of two the even one; what is beyond 448 becomes 448."""
    if NATIVE:
        # The instruction saturates.
        rounded = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 8 * (127 - 7)
        # Beside 2^14 float32's last bit is worth 2^-9, like the last bit of e4m3's subnormal numbers.
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        magnitude = tl.where(size < 2.0**-6, subnormal, normal)
        is_number = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= 0x7F800000
        rounded = (tl.where(is_number, magnitude, 0x7F) | sign).to(tl.uint8)
    return rounded


@jit
def round_rows(x, NATIVE: tl.constexpr):
    """Return rows, [rows, size] float32, as bytes of e4m3, the largest of a row 448, and their scales."""
    largest = tl.max(tl.abs(x), axis=1)
    scales = tl.where(largest > 0, largest / 448.0, 1.0)
    return to_e4m3(x / scales[:, None], NATIVE), scales


@jit
def _dequantize_kernel(
    bytes_ptr, out_ptr, out_features, in_features, scale_ptr,
    TILE_OUTS: tl.constexpr, TILE_INS: tl.constexpr,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * TILE_OUTS + tl.arange(0, TILE_OUTS)
    ins = tl.program_id(1) * TILE_INS + tl.arange(0, TILE_INS)
    out_mask = outs < out_features
    mask = out_mask[:, None] & (ins < in_features)[None, :]
    offsets = outs.to(tl.int64)[:, None] * in_features + ins[None, :]
    values = from_e4m3(tl.load(bytes_ptr + offsets, mask=mask, other=0), tl.float16, NATIVE).to(tl.float32)
    blocks = outs // SCALE_OUTS
    if SCALE_INS:
        # A tile is within one block of inputs.
        blocks = blocks * tl.cdiv(in_features, SCALE_INS) + tl.program_id(1) * TILE_INS // SCALE_INS
    scales = tl.load(scale_ptr + blocks, mask=out_mask, other=0.0)
    tl.store(out_ptr + offsets, (values * scales[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(matrix: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix in `dtype`, [out_features, in_features]."""
    if not uses_triton(matrix.values.device):
        return dequantize_ref(matrix, dtype)
    (out_features, in_features), scaling = matrix.values.shape, matrix.scaling
    assert scaling["SCALE_INS"] % _TILE_INS == 0 and matrix.values.is_contiguous() and matrix.scales.is_contiguous()
    out = torch.empty(matrix.values.shape, dtype=dtype, device=matrix.values.device)
    _dequantize_kernel[(triton.cdiv(out_features, _TILE_OUTS), triton.cdiv(in_features, _TILE_INS))](
        matrix.bytes, out, out_features, in_features, TILE_OUTS=_TILE_OUTS, TILE_INS=_TILE_INS, **scaling,
    )  # fmt: skip
    return out
