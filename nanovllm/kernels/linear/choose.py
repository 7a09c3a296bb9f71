"""The choice of a linear layer's kernel and tile, in plain Python: it runs no kernel and imports none.

The first row that holds is taken; "16-bit" is bfloat16 and float16, and every kernel but cuBLAS needs Triton. What each
row gains: kernels/README.md.

| rows of x | kernel | holds where |
|---|---|---|
| 1 | gemv | any dtype |
| 2-16 | resident_gemm | 16-bit, few inputs, all programs resident at once: `should_use_resident` |
| 2-16 | skinny_gemm | 16-bit |
| 17-256 | splitk_gemm | Hopper, 16-bit, no bias, small weights, all programs resident at once: `should_use_splitk` |
| any | persistent_gemm | Hopper, 16-bit, no bias, gated, tiles fill the device: `should_use_persistent` |
| any | cuBLAS | otherwise |

With e4m3 weights (`choose_fp8`):

| rows of x | kernel | holds where |
|---|---|---|
| 1 | gemv | any dtype |
| 2-16 | skinny_gemm | 16-bit |
| 65 and more | rows in e4m3, `torch._scaled_mm` | sm_89 and newer, bfloat16; blocks of scales: Hopper, CUDA 12.9 |
| 17 and more | rows in e4m3, scaled_gemm | sm_89 and newer, 16-bit |
| any | cuBLAS over weights that are dequantised before | otherwise |

Where the next norm adds up parts of sums, scaled_gemm takes up to 128 rows (`fp8_parts`).
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.kernels._triton import converts_e4m3, device_limits, is_hopper, triton, uses_triton

if TYPE_CHECKING:
    from nanovllm.kernels.e4m3 import Fp8Matrix

MAX_SKINNY_ROWS = 16
"""With more rows cuBLAS is faster: with 32, layers of Qwen3-1.7B to 32B take 6 to 17% longer in `skinny_gemm`."""

RESIDENT_CHUNK = 1024
"""Inputs per chunk of `resident_gemm`, divided among a program's warps."""
MAX_RESIDENT_OUTS = 32
"""Maximum outputs per program of `resident_gemm`."""

MAX_SPLITK_ROWS = 256
"""With more rows cuBLAS is faster: with 384 rows a step of 0.6B with `splitk_gemm` takes up to 7% longer."""
SPLITK_PARTS = 4
"""Programs per output tile of `splitk_gemm` in a layer with few outputs."""
SPLITK_ROWS = 64
"""Rows per output tile of `splitk_gemm`."""

PERSISTENT_ROWS = 128
"""Rows per output tile of `persistent_gemm`; each warpgroup takes half."""
PERSISTENT_COLUMNS = 128
"""Half of a tile's columns in `persistent_gemm`; each half's weight rows are contiguous. In
`persistent_qkv_rope_store` a half is a head, so it supports heads of this size."""
PERSISTENT_INS = 64
"""Inputs per step of `persistent_gemm`."""


MAX_OWN_FP8_ROWS = 64
"""Up to here `torch._scaled_mm` takes as long in e4m3 as cuBLAS in bf16 (H200, layers of 8B)."""
MAX_SPLIT_FP8_ROWS = 128
"""Up to here `scaled_gemm` is faster than `torch._scaled_mm` if it may leave its sums in parts to the next norm."""
FP8_INS = 128
"""Inputs per step of `scaled_gemm`, which are in one block of scales."""


class LinearKernel(Enum):
    """What computes a linear layer.

    SCALED_MM is `torch._scaled_mm`, and CUBLAS torch's own product, also on the CPU; each other kernel is the function
    of that name in the file of that name.
    """

    GEMV = auto()
    RESIDENT_GEMM = auto()
    SKINNY_GEMM = auto()
    SPLITK_GEMM = auto()
    PERSISTENT_GEMM = auto()
    SCALED_GEMM = auto()
    SCALED_MM = auto()
    CUBLAS = auto()


def choose(num_rows: int, weight: torch.Tensor, *, biased: bool, normed: bool, gated: bool) -> LinearKernel:
    """Return the kernel for `num_rows` rows and a weight, [out_features, in_features]; see the table above."""
    device = weight.device
    if not uses_triton(device):
        return LinearKernel.CUBLAS
    if num_rows == 1:
        return LinearKernel.GEMV
    if num_rows <= MAX_SKINNY_ROWS and weight.element_size() == 2:
        is_resident = should_use_resident(num_rows, weight, normed, gated)
        return LinearKernel.RESIDENT_GEMM if is_resident else LinearKernel.SKINNY_GEMM
    if is_hopper(device) and not biased:
        if should_use_splitk(num_rows, weight, gated):
            return LinearKernel.SPLITK_GEMM
        if gated and should_use_persistent(num_rows, weight):
            return LinearKernel.PERSISTENT_GEMM
    return LinearKernel.CUBLAS


def choose_fp8(num_rows: int, dtype: torch.dtype, weight: Fp8Matrix) -> LinearKernel:
    """Return the kernel for rows of a dtype and e4m3 weights; see the table above."""
    device = weight.values.device
    if should_quantize_rows(num_rows, dtype, device):
        is_large = num_rows > MAX_OWN_FP8_ROWS and dtype == torch.bfloat16
        return LinearKernel.SCALED_MM if is_large and supports_scaled_mm(weight) else LinearKernel.SCALED_GEMM
    if not uses_triton(device):
        return LinearKernel.CUBLAS
    if num_rows == 1:
        return LinearKernel.GEMV
    is_skinny = num_rows <= MAX_SKINNY_ROWS and dtype.itemsize == 2
    return LinearKernel.SKINNY_GEMM if is_skinny else LinearKernel.CUBLAS


def supports_scaled_mm(weight: Fp8Matrix) -> bool:
    """Return whether `torch._scaled_mm` takes a weight; scales of blocks it reads 16 bytes at a time."""
    out_features, in_features = weight.values.shape
    if weight.scales.shape[1] == 1:
        return out_features % 16 == 0 and in_features % 16 == 0
    is_even = out_features % 16 == 0 and in_features % (4 * FP8_INS) == 0
    return is_even and weight.block_outs == FP8_INS and _scales_blocks(weight.values.device)


@cache
def _scales_blocks(device: torch.device) -> bool:
    version = (torch.version.cuda or "0.0").split(".")
    return is_hopper(device) and (int(version[0]), int(version[1])) >= (12, 9)


def should_quantize_rows(num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether rows are rounded to e4m3 beside weights of e4m3, which the device then multiplies in 8 bits."""
    return num_rows > MAX_SKINNY_ROWS and dtype.itemsize == 2 and uses_triton(device) and converts_e4m3(device)


def fp8_parts(num_rows: int, dtype: torch.dtype, weight: Fp8Matrix) -> int:
    """Return the parts in which `scaled_gemm` leaves the sums of a layer to the next norm; 1 is none.

    Then it is chosen for up to MAX_SPLIT_FP8_ROWS rows instead of `torch._scaled_mm`.
    """
    is_own = choose_fp8(num_rows, dtype, weight) is LinearKernel.SCALED_GEMM
    num_steps = -(-weight.values.shape[1] // FP8_INS)
    few = num_rows <= (MAX_SPLITK_ROWS if is_own else MAX_SPLIT_FP8_ROWS)
    return SPLITK_PARTS if few and num_steps % SPLITK_PARTS == 0 else 1


def resident_outs(out_features: int, num_programs: int) -> int:
    """Return the outputs per program of `resident_gemm`: the least multiple of 8 >= 16 with all programs resident."""
    return max(16, 8 * -(-out_features // (8 * max(num_programs, 1))))


def should_use_resident(num_rows: int, weight: torch.Tensor, normed: bool, gated: bool) -> bool:
    """Return whether `resident_gemm` is supported and fastest: few rows, few inputs, all programs resident at once.

    The limit is one chunk of inputs with a norm or gate, and three without: with norm and 2048 inputs at 8 rows,
    Qwen3-1.7B's QKV takes 8.0 us, and 7.7 as norm and `skinny_gemm`.
    """
    out_features, in_features = len(weight) // 2 if gated else len(weight), weight.shape[1]
    num_programs, shared_bytes = device_limits(weight.device)
    chunks, outs = -(-in_features // RESIDENT_CHUNK), resident_outs(out_features, num_programs)
    # `resident_gemm` copies weights in units of 16 bytes.
    if num_rows > MAX_SKINNY_ROWS or in_features % 8 or outs > MAX_RESIDENT_OUTS:
        return False
    # Shared memory holds all weights and inputs of a program.
    tile_rows = (2 if gated else 1) * triton.next_power_of_2(outs) + MAX_SKINNY_ROWS
    fits = chunks * RESIDENT_CHUNK * tile_rows * weight.element_size() <= shared_bytes
    return bool(fits and chunks <= (1 if normed or gated else 3))


class SplitKTile(NamedTuple):
    """Outputs per program of `splitk_gemm`, inputs per step, and pipeline stages."""

    outs: int
    step: int
    stages: int


def splitk_tiles(num_rows: int, gated: bool, parts: int) -> list[SplitKTile]:
    """Return the tile shapes to try, narrow ones first: they are faster if all programs are resident at once.

    Two programs fit on a multiprocessor, so that the next kernel's programs, such as attention's, fit beside them and
    start early. A plain product with one row of tiles leaves multiprocessors free, so its steps take more inputs.
    """
    if gated:
        return [SplitKTile(32, 64, 6), SplitKTile(64, 64, 4)]
    if parts > 1:
        return [SplitKTile(32, 128, 4), SplitKTile(64, 128, 3)]
    return [SplitKTile(64, 128, 4) if num_rows <= SPLITK_ROWS else SplitKTile(64, 64, 6)]


def find_splitk_tile(num_rows: int, weight: torch.Tensor, gated: bool, parts: int) -> SplitKTile | None:
    """Return the first tile shape that divides the work evenly into programs that are all resident at once."""
    out_features, in_features = len(weight) // 2 if gated else len(weight), weight.shape[1]
    num_processors, shared_bytes = device_limits(weight.device)
    for tile in splitk_tiles(num_rows, gated, parts):
        programs = -(-num_rows // SPLITK_ROWS) * (out_features // tile.outs) * parts
        program_bytes = tile.stages * (SPLITK_ROWS + tile.outs * (2 if gated else 1)) * tile.step * 2
        even = in_features % (parts * tile.step) == 0 and out_features % tile.outs == 0
        if even and programs <= num_processors * (shared_bytes // program_bytes):
            return tile
    return None


def _most_splitk_ins(num_rows: int, gated: bool) -> int:
    """Return the maximum inputs per program: above, reading the weights dominates, and cuBLAS reads as fast or faster.

    Measured with 17 to 32, 33 to 64, and more rows, of 1024 (Qwen3-0.6B) to 4096 inputs (8B).
    """
    if num_rows <= 32:
        return 2048
    return 4096 if num_rows <= SPLITK_ROWS and not gated else 2560


def should_use_splitk(num_rows: int, weight: torch.Tensor, gated: bool = False, parts: int = 1) -> bool:
    """Return whether `splitk_gemm` is supported and fastest: small weights, all programs resident at once."""
    small = num_rows <= MAX_SPLITK_ROWS and weight.shape[1] <= parts * _most_splitk_ins(num_rows, gated)
    return weight.element_size() == 2 and small and find_splitk_tile(num_rows, weight, gated, parts) is not None


def should_use_persistent(num_rows: int, weight: torch.Tensor) -> bool:
    """Return whether `persistent_gemm` supports these shapes, and tiles fill nine tenths of all waves of programs.

    Otherwise cuBLAS is faster: gate and up of Qwen3-0.6B with 1500 rows take 39.7 us here and 34.8 with cuBLAS.
    """
    out_features, in_features = weight.shape
    is_even = in_features % PERSISTENT_INS == 0 and out_features % (2 * PERSISTENT_COLUMNS) == 0
    num_programs = device_limits(weight.device)[0]
    tiles = -(-num_rows // PERSISTENT_ROWS) * (out_features // (2 * PERSISTENT_COLUMNS))
    return weight.element_size() == 2 and is_even and tiles >= 0.9 * num_programs * -(-tiles // num_programs)


def should_project_qkv(num_rows: int, weight: torch.Tensor, head_dim: int) -> bool:
    """Return whether `persistent_qkv_rope_store` supports these shapes, and is faster than two kernels."""
    is_supported = is_hopper(weight.device) and head_dim == PERSISTENT_COLUMNS
    return is_supported and should_use_persistent(num_rows, weight)
