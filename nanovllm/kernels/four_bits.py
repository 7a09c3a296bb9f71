"""Matrices of four-bit values with scales for groups of inputs: rounding to them and back.

Values are integers, or e2m1 with scales in e8m0 (MXFP4, arXiv:2310.10537) or in e4m3 (NVFP4). There is one layout:
16 bytes hold 32 inputs, the first 16 in their low halves. So both halves of bytes are runs of inputs, which need no
shuffle before a product.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from nanovllm.kernels._triton import INTERPRETED as _INTERPRETED
from nanovllm.kernels._triton import jit, tl, uses_triton

FourBitFormat = Literal["int4", "mxfp4", "nvfp4"]
RUN = 32
"""Inputs of 16 bytes."""
E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""The values without a sign, which is the highest bit, by their bits."""
_ZERO = 8
"""What stands for zero in integers without zeros of their own."""
_CLIPS = 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7
"""Shares of a group's largest value that may become the largest integer."""
_TILE_OUTS, _TILE_INS = 32, 128


class FourBitMatrix(NamedTuple):
    """The matrix of a linear layer, or one for each expert: each value minus its zero, times its scale.

    Attributes:
        values: [out_features, in_features / 2] uint8, or [num_experts, ...]; inputs are padded to a multiple of `RUN`.
        scales: [out_features, in_features / group], rounded up; bits of e8m0 ("mxfp4") or e4m3 ("nvfp4"), uint8, or
            floats ("int4"). One for an output if there is one column.
        zeros: like scales, uint8; None for 8.
        factors: [out_features] float32, of all scales; None for 1.
        group: inputs that have one scale, a power of two.
        format: of values and scales.
        in_features: without padding.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None
    group: int
    format: FourBitFormat
    in_features: int

    @property
    def scaling(self) -> dict[str, Any]:
        """All but the values as arguments of kernels; `SCALE_INS` is huge where an output has one scale."""
        group = self.group if self.scales.shape[-1] > 1 else 2**30
        return {
            "scale_ptr": self.scales, "zero_ptr": self.zeros, "factor_ptr": self.factors, "SCALE_INS": group,
            "FORMAT": self.format,
        }  # fmt: skip

    def unit(self, step: int) -> int:
        """Return the least inputs that are whole steps and groups, two powers of two."""
        return step if self.scales.shape[-1] == 1 else max(step, self.group)

    def outputs(self, start: int, stop: int) -> FourBitMatrix:
        """Return the matrix of outputs `start ... stop - 1`."""
        return self._of(slice(start, stop))

    def expert(self, number: int) -> FourBitMatrix:
        """Return the matrix of one expert."""
        return self._of(number)

    def _of(self, place: slice | int) -> FourBitMatrix:
        zeros, factors = (None if tensor is None else tensor[place] for tensor in (self.zeros, self.factors))
        return self._replace(values=self.values[place], scales=self.scales[place], zeros=zeros, factors=factors)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values in bits of uint8, [..., in_features]; padding is zeros."""
    runs = functional.pad(codes, (0, -codes.shape[-1] % RUN)).unflatten(-1, (-1, 2, RUN // 2))
    return (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(-2)


def unpack(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values in bytes, [..., 2 * bytes] uint8, with padding."""
    runs = values.unflatten(-1, (-1, 1, RUN // 2))
    return torch.cat((runs & 15, runs >> 4), -2).flatten(-3)


def wide_scales(scales: torch.Tensor, kind: FourBitFormat) -> torch.Tensor:
    """Return scales in float32."""
    if kind == "mxfp4":
        return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return (scales.view(torch.float8_e4m3fn) if kind == "nvfp4" else scales).float()


def dequantize_four_bits_ref(matrix: FourBitMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Plain torch form of `dequantize_four_bits`."""
    codes = unpack(matrix.values)[:, : matrix.in_features]

    def spread(groups: torch.Tensor) -> torch.Tensor:
        each = matrix.group if groups.shape[1] > 1 else matrix.in_features
        return groups.repeat_interleave(each, 1)[:, : matrix.in_features]

    if matrix.format == "int4":
        zeros = _ZERO if matrix.zeros is None else spread(matrix.zeros).float()
        wide = codes.float() - zeros
    else:
        wide = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)[codes.int()]
    wide *= spread(wide_scales(matrix.scales, matrix.format))
    return (wide if matrix.factors is None else wide * matrix.factors[:, None]).to(dtype)


def quantize_four_bits(weight: torch.Tensor, group: int, kind: FourBitFormat, dtype: torch.dtype) -> FourBitMatrix:
    """Round a matrix, [out_features, in_features], to four bits; dtype: of the scales of integers.

    Integers are symmetric, with scales of the least squared error among several. A group with a value that is not
    finite has a scale that is not finite, or a factor.
    """
    num_ins = weight.shape[1]
    groups = functional.pad(weight.float(), (0, -num_ins % group)).unflatten(1, (-1, group))
    factors = None
    if kind == "int4":
        codes, scales = _round_to_integers(groups, dtype)
    else:
        most = groups.abs().amax(2) / E2M1[-1]
        if kind == "nvfp4":
            factors = (weight.float().abs().amax(1) / (E2M1[-1] * 448)).clamp_(min=2.0**-100)
            rounded = (most / factors[:, None]).clamp_(2.0**-9, 448).to(torch.float8_e4m3fn)
            scales = rounded.view(torch.uint8)
            wide = rounded.float() * factors[:, None]
        else:
            scales = torch.where(most.isfinite(), most.log2().ceil().clamp(-126, 126) + 127, 255).to(torch.uint8)
            wide = wide_scales(scales, kind)
        ratios = groups / wide[:, :, None]
        table = torch.tensor(E2M1, device=weight.device)
        codes = torch.bucketize(ratios.abs().contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
        codes |= ratios.signbit().to(torch.uint8) << 3
    values = pack(codes.flatten(1)[:, :num_ins])
    return FourBitMatrix(values, scales, None, factors, group, kind, num_ins)


def _round_to_integers(groups: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of [outs, groups, inputs], and scales, [outs, groups]."""
    # Of the two ends, the further one is given to the sign of the largest value.
    most, least = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    largest = torch.where(most > -least, most, least)
    best_errors, best_codes, best = torch.full_like(largest, torch.inf), torch.full_like(groups, 8), largest
    for clip in _CLIPS:
        scales = (largest * (clip / -8)).to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        codes = (groups / scales).round_().clamp_(-8, 7)
        errors = (codes * scales - groups).square_().sum(2, keepdim=True)
        is_better = errors < best_errors
        best_errors = torch.where(is_better, errors, best_errors)
        best_codes, best = torch.where(is_better, codes, best_codes), torch.where(is_better, scales, best)
    return (best_codes + _ZERO).to(torch.uint8), best.squeeze(2).to(dtype)


def from_int4(kind: str, one: str, base: str, minus: str, factor: str | None = None) -> str:
    """Return assembly for integers: a number whose last bit is worth 1 with the value's bits, plus `minus`.

    minus: makes it the value; factor: of the result, or None. Both are twice in a register.
    """
    made = "shr.u32 c, a, 4; shr.u32 d, b, 4; "
    for i, name in enumerate("abcd"):
        made += f"lop3.b32 ${i}, {name}, 0x000f000f, base, 0xea; fma.rn.{kind} ${i}, ${i}, one, minus; "
        made += "" if factor is None else f"fma.rn.{kind} ${i}, ${i}, {factor}, zero; "
    consts = f"mov.b32 one, {one}; mov.b32 base, {base}; mov.b32 minus, {minus}; mov.b32 zero, 0x80008000; "
    return f"{{ .reg .b32 a, b, c, d, one, base, minus, zero; {consts}{_SPREAD}{made}}}"


def from_e2m1(kind: str, shift: int, mask: str, low: str, high: str) -> str:
    """Return assembly for e2m1: exponent and mantissa `shift` bits higher, where the other exponent ends.

    low, high: factors of low and of high halves of bytes, twice in a register.
    """
    made = ""
    for i, (name, half) in enumerate((("a", 0), ("b", 0), ("a", 4), ("b", 4))):
        sign, rest = 12 - half, shift - half
        if kind == "bf16x2":
            # One product puts the bits into both places.
            places = (1 << sign) + (1 << rest)
            made += f"and.b32 c, {name}, {0x000F000F << half:#x}; mul.lo.u32 c, c, {places}; and.b32 c, c, {mask}; "
        else:
            # There the places overlap.
            made += f"shl.b32 c, {name}, {rest}; shl.b32 d, {name}, {sign}; and.b32 c, c, {mask}; "
            made += "lop3.b32 c, d, zero, c, 0xea; "
        made += f"fma.rn.{kind} ${i}, c, {'high' if half else 'low'}, zero; "
    consts = f"mov.b32 zero, 0x80008000; mov.b32 low, {low}; mov.b32 high, {high}; "
    return f"{{ .reg .b32 a, b, c, d, low, high, zero; {consts}{_SPREAD}{made}}}"


_SPREAD = "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; "
"""Two bytes in the low bytes of two halves."""
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")
_INT4_TO_BF16 = tl.constexpr(from_int4("bf16x2", "0x3f803f80", "0x43004300", "0xc308c308"))
_INT4_TO_F16 = tl.constexpr(from_int4("f16x2", "0x3c003c00", "0x64006400", "0xe408e408"))
_E2M1_TO_BF16 = tl.constexpr(from_e2m1("bf16x2", 6, "0x81c081c0", "0x7e807e80", "0x7e807e80"))
_E2M1_TO_F16 = tl.constexpr(from_e2m1("f16x2", 9, "0x0e000e00", "0x74007400", "0x74007400"))


@jit
def widen_values(bytes, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return the values in low and in high halves of bytes as `dtype`; of integers minus 8; exactly."""
    # Bits are put where a float of 16 bits has its last ones (integers), or the last ones of its exponent (e2m1, whose
    # exponents have another bias); a difference, or a product by a power of two, corrects that.
    IS_INTEGER: tl.constexpr = FORMAT == "int4"
    if _INTERPRETED or dtype == tl.float32:
        bits = bytes.to(tl.int32)
        low, high = _widen(bits & 15, IS_INTEGER).to(dtype), _widen(bits >> 4, IS_INTEGER).to(dtype)
    elif dtype == tl.bfloat16:
        TO_BF16: tl.constexpr = _INT4_TO_BF16 if IS_INTEGER else _E2M1_TO_BF16
        low, high = tl.inline_asm_elementwise(TO_BF16, _REGISTERS, [bytes], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        TO_F16: tl.constexpr = _INT4_TO_F16 if IS_INTEGER else _E2M1_TO_F16
        low, high = tl.inline_asm_elementwise(TO_F16, _REGISTERS, [bytes], (tl.float16, tl.float16), True, 4)
    return low, high


@jit
def fma_pairs(x, y, z, dtype: tl.constexpr):
    """Return x * y + z, rounded once, two values at a time: Triton computes halves of registers one by one."""
    if _INTERPRETED or dtype == tl.float32:
        out = x * y + z
    else:
        KIND: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        asm: tl.constexpr = "fma.rn." + KIND + " $0, $1, $2, $3;"
        out = tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, y, z], dtype, True, 2)
    return out


@jit
def _widen(bits, IS_INTEGER: tl.constexpr):
    if IS_INTEGER:
        wide = (bits - 8).to(tl.float32)
    else:
        size = bits & 7
        # e2m1 times 2, without its subnormal number.
        wide = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0)).to(tl.float32) * 0.5
        wide = tl.where(bits > 7, -wide, wide)
    return wide


@jit
def widen_scales(scales, FORMAT: tl.constexpr):
    """Return scales in float32; 2^-127 is 0."""
    if FORMAT == "mxfp4":
        wide = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif FORMAT == "nvfp4":
        wide = (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        wide = scales.to(tl.float32)
    return wide


@jit
def load_scales(scale_ptrs, mask, FORMAT: tl.constexpr):
    """Return scales in float32; 0 where the mask is false."""
    return widen_scales(tl.load(scale_ptrs, mask=mask, other=0), FORMAT)


@jit
def multiply_four_bits(
    acc, x_ptrs, x_mask, value_ptrs, scale_ptrs, zero_ptrs, out_mask, in_features,
    INS: tl.constexpr, SCALE_INS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Return acc, [rows, outs] float32, plus rows times weights, which are scaled in the dtype of the rows.

    x_ptrs: of rows; value_ptrs, scale_ptrs, zero_ptrs: of the first byte and group of outputs; INS: inputs of a step.
    """
    # Inputs of a step that have one scale, or one in each half of their bytes.
    SPAN: tl.constexpr = max(32, min(SCALE_INS, INS))
    SPANS: tl.constexpr = INS // SPAN
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    columns = tl.arange(0, INS // 2)
    ins = columns // 16 * 32 + columns % 16
    spans = tl.arange(0, SPANS)[:, None, None]
    bytes = spans * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, :, None]
    for start in range(0, in_features, INS):
        x_low = tl.load(
            x_ptrs[:, None] + (start + ins)[None, :],
            mask=x_mask[:, None] & (start + ins < in_features)[None, :], other=0.0,
        )  # fmt: skip
        x_high = tl.load(
            x_ptrs[:, None] + (start + 16 + ins)[None, :],
            mask=x_mask[:, None] & (start + 16 + ins < in_features)[None, :], other=0.0,
        )  # fmt: skip
        mask = out_mask[None, None, :] & (start + bytes // 16 * 32 < in_features)
        low, high = widen_values(
            tl.load(value_ptrs[None, None, :] + start // 2 + bytes, mask=mask, other=0), dtype, FORMAT
        )
        first = start + spans * SPAN
        scale_mask = out_mask[None, None, :] & (first < in_features)
        scales = load_scales(scale_ptrs[None, None, :] + first // SCALE_INS, scale_mask, FORMAT)
        if zero_ptrs is not None:
            zeros = tl.load(zero_ptrs[None, None, :] + first // SCALE_INS, mask=scale_mask, other=8)
            zeros = (8 - zeros.to(tl.int32)).to(dtype)
            one = tl.full([1, 1, 1], 1.0, dtype)
            low, high = fma_pairs(low, one, zeros, dtype), fma_pairs(high, one, zeros, dtype)
        high_scales = scales
        if SCALE_INS == 16:
            scale_mask = out_mask[None, None, :] & (first + 16 < in_features)
            high_scales = load_scales(scale_ptrs[None, None, :] + first // 16 + 1, scale_mask, FORMAT)
        zero = tl.full([1, 1, 1], -0.0, dtype)
        low, high = (
            fma_pairs(low, scales.to(dtype), zero, dtype), fma_pairs(high, high_scales.to(dtype), zero, dtype)
        )  # fmt: skip
        OUTS: tl.constexpr = out_mask.shape[0]
        acc = tl.dot(x_low, tl.reshape(low, [INS // 2, OUTS]), acc, input_precision="ieee")
        acc = tl.dot(x_high, tl.reshape(high, [INS // 2, OUTS]), acc, input_precision="ieee")
    return acc


@jit
def _dequantize_kernel(
    values_ptr, out_ptr, out_features, in_features, scale_ptr, zero_ptr, factor_ptr,
    OUTS: tl.constexpr, INS: tl.constexpr, SCALE_INS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    # [outs, runs of inputs, 16]
    runs = (tl.program_id(1) * (INS // 32) + tl.arange(0, INS // 32))[None, :, None]
    rows = outs.to(tl.int64)[:, None, None]
    places = tl.arange(0, 16)[None, None, :]
    is_out, num_groups = outs[:, None, None] < out_features, tl.cdiv(in_features, SCALE_INS)
    mask = is_out & (runs * 32 < in_features)
    row_ptrs = values_ptr + rows * (tl.cdiv(in_features, 32) * 16)
    bytes = tl.load(row_ptrs + runs * 16 + places, mask=mask, other=0)
    low, high = widen_values(bytes, tl.float16, FORMAT)
    low, high = low.to(tl.float32), high.to(tl.float32)
    if factor_ptr is not None:
        factors = tl.load(factor_ptr + outs, mask=outs < out_features, other=0.0)[:, None, None]
    for half in tl.static_range(2):
        wide = low if half == 0 else high
        ins = runs * 32 + half * 16
        groups = rows * num_groups + ins // SCALE_INS
        group_mask = is_out & (ins < in_features)
        if zero_ptr is not None:
            wide -= tl.load(zero_ptr + groups, mask=group_mask, other=8).to(tl.float32) - 8.0
        wide *= load_scales(scale_ptr + groups, group_mask, FORMAT)
        if factor_ptr is not None:
            wide *= factors
        ptrs = out_ptr + rows * in_features + ins + places
        tl.store(ptrs, wide.to(out_ptr.dtype.element_ty), mask=is_out & (ins + places < in_features))


def dequantize_four_bits(matrix: FourBitMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix in `dtype`, [out_features, in_features]."""
    if not uses_triton(matrix.values.device):
        return dequantize_four_bits_ref(matrix, dtype)
    out_features, in_features = len(matrix.values), matrix.in_features
    out = torch.empty(out_features, in_features, dtype=dtype, device=matrix.values.device)
    _dequantize_kernel[(ceil(out_features / _TILE_OUTS), ceil(in_features / _TILE_INS))](
        matrix.values, out, out_features, in_features, OUTS=_TILE_OUTS, INS=_TILE_INS, num_warps=4, **matrix.scaling,
    )  # fmt: skip
    return out
