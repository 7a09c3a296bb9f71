"""The choice of kernels by the number of rows, in plain Python: it runs no kernel and imports none.

Weights, attention and collectives ask one `KernelPolicy` for all that depends on the rows of a step. kernels/README.md
has the tables of choices, from top to bottom, and of each kernel's gain.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.kernels._triton import converts_e4m3, device_limits, is_hopper, triton, uses_triton

if TYPE_CHECKING:
    from nanovllm.kernels.e4m3 import Fp8Matrix
    from nanovllm.kernels.four_bits import FourBitMatrix

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
MAX_GATED_ROWS = 64
"""Sums of gate and up for more do not fit into the registers of `scaled_gemm`."""

MAX_FOUR_BIT_ROWS = 64
"""Of more rows, weights in four bits become 16-bit before the product, and with many outputs of twice the rows; 128
rows on an H200: [4096, 12288] 195 us by `four_bit_gemm` and 92, [24576, 4096] 107 and 161."""
_MANY_FOUR_BIT_OUTS = 8192
MAX_HOPPER_FOUR_BIT_ROWS = 512
"""The same on Hopper. 8B's gate and up in integers at 512 rows, H200: 142 us, dequantised 230."""

MAX_EXPERT_ROWS = 16
"""Up to this many rows `expert_gemm` multiplies each by its own experts; more are sorted by expert."""
EXPERT_TILE_ROWS = (8, 24, 64, 512)
"""Rows that an expert has on the average, up to which `grouped_gemm` takes a tile; most experts' weights are read once
by it."""

FEW_SEQS = 64
"""Up to this many sequences, `decode_attention` uses smaller tiles and fewer programs: 5% less for a step of 64."""
_PROGRAMS_FOR_BANDWIDTH = 80
"""Programs of `hopper_decode` that saturate an H200's read bandwidth."""
_FREE_TOKENS = 190
"""Tokens that one program reads in the time that merging splits takes."""
_MAX_WIDENED = 2
"""Tokens of contexts that are widened for each prompt token, at most."""
_ONE_SHOT_BYTES = 2**19
"""Bytes that a rank receives up to which an all-reduce is one-shot."""


class LinearKernel(Enum):
    """The kernel of a linear layer: torch's, or the function of that name in the file of that value in `linear/`."""

    GEMV = "gemv"
    RESIDENT_GEMM = "resident_gemm"
    SKINNY_GEMM = "skinny_gemm"
    SPLITK_GEMM = "splitk_gemm"
    PERSISTENT_GATED_GEMM = "persistent_gemm"
    SCALED_GEMM = "scaled_gemm"
    SKINNY_FOUR_BIT_GEMM = "skinny_four_bit_gemm"
    FOUR_BIT_GEMM = "four_bit_gemm"
    HOPPER_FOUR_BIT_GEMM = "hopper_four_bit_gemm"
    SCALED_MM = "torch's in e4m3"
    CUBLAS = "torch's, also on the CPU"


def resident_outs(out_features: int, num_programs: int) -> int:
    """Return the outputs per program of `resident_gemm`: the least multiple of 8 >= 16 with all programs resident."""
    return max(16, 8 * -(-out_features // (8 * max(num_programs, 1))))


class SplitKTile(NamedTuple):
    """Outputs per program of `splitk_gemm`, inputs per step, and pipeline stages."""

    outs: int
    step: int
    stages: int


def splitk_tiles(num_rows: int, gated: bool, parts: int) -> list[SplitKTile]:
    """Return the tile shapes to try, narrow ones first: they are faster if all programs are resident at once.

    Two programs fit on a multiprocessor, so that some of the next kernel's fit beside them and start early.
    """
    if gated:
        return [SplitKTile(32, 64, 6), SplitKTile(64, 64, 4)]
    if parts > 1:
        return [SplitKTile(32, 128, 4), SplitKTile(64, 128, 3)]
    return [SplitKTile(64, 128, 4) if num_rows <= SPLITK_ROWS else SplitKTile(64, 64, 6)]


def _most_splitk_ins(num_rows: int, gated: bool) -> int:
    """Return the maximum inputs per program: above, reading the weights dominates, which cuBLAS does as fast."""
    if num_rows <= 32:
        return 2048
    return 4096 if num_rows <= SPLITK_ROWS and not gated else 2560


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


class ExpertsKernel(Enum):
    """The kernel of a mixture's experts: the function of that name."""

    EXPERT_GEMV = auto()
    EXPERT_GEMM = auto()
    GROUPED_GEMM = auto()


class KernelPolicy:
    """Chooses the fastest kernel for each number of rows.

    A subclass that does not look at the number of rows makes a sequence's bits independent of the others in its batch.

    Attributes:
        dense_rows, fp8_rows, four_bit_rows, attention_rows: numbers of rows at which the choice for weights in 16 bits,
            e4m3 and four bits, and for decode attention changes; one step of each is compiled at the start.
        dense_tokens, fp8_tokens, four_bit_tokens: the same for prompt tokens, beside rows that decode.
        uses_cascade: whether sequences that share a prefix may attend to it together.
        uses_hopper_decode: whether rows without drafts may attend by `hopper_decode`, as rows with drafts cannot.
    """

    dense_rows: tuple[int, ...] = (1, 2, MAX_SKINNY_ROWS + 1, 33, SPLITK_ROWS + 1, 129, 193)
    dense_tokens: tuple[int, ...] = (SPLITK_ROWS + 1,)
    fp8_rows: tuple[int, ...] = (
        1, 2, MAX_SKINNY_ROWS // 2 + 1, MAX_SKINNY_ROWS + 1, 33, MAX_OWN_FP8_ROWS + 1, MAX_SPLIT_FP8_ROWS + 1,
        MAX_SPLITK_ROWS + 1,
    )  # fmt: skip
    fp8_tokens: tuple[int, ...] = (MAX_OWN_FP8_ROWS + 1,)
    four_bit_rows: tuple[int, ...] = (
        1, 2, MAX_SKINNY_ROWS // 2 + 1, MAX_SKINNY_ROWS + 1, 33, MAX_FOUR_BIT_ROWS + 1, 2 * MAX_FOUR_BIT_ROWS + 1,
        MAX_SPLITK_ROWS + 1, MAX_HOPPER_FOUR_BIT_ROWS + 1,
    )  # fmt: skip
    four_bit_tokens: tuple[int, ...] = (MAX_FOUR_BIT_ROWS + 1, 2 * MAX_FOUR_BIT_ROWS + 1)
    # With 8 KV heads, 17 rows launch more programs than an H200 has multiprocessors; with 2 KV heads, 65 do.
    attention_rows: tuple[int, ...] = (1, 17, FEW_SEQS + 1)
    uses_cascade = uses_hopper_decode = True

    def linear(self, num_rows: int, weight: torch.Tensor, *, biased: bool, normed: bool, gated: bool) -> LinearKernel:
        """Return the kernel for `num_rows` rows and a weight, [out_features, in_features]."""
        device = weight.device
        if not uses_triton(device):
            return LinearKernel.CUBLAS
        if num_rows == 1:
            return LinearKernel.GEMV
        if num_rows <= MAX_SKINNY_ROWS and weight.element_size() == 2:
            is_resident = self.uses_resident(num_rows, weight, normed, gated)
            return LinearKernel.RESIDENT_GEMM if is_resident else LinearKernel.SKINNY_GEMM
        if is_hopper(device) and not biased:
            if self.uses_splitk(num_rows, weight, gated):
                return LinearKernel.SPLITK_GEMM
            if gated and self.uses_persistent(num_rows, weight):
                return LinearKernel.PERSISTENT_GATED_GEMM
        return LinearKernel.CUBLAS

    def uses_resident(self, num_rows: int, weight: torch.Tensor, normed: bool, gated: bool) -> bool:
        """Return whether `resident_gemm` is supported and fastest: few rows and inputs, and all programs resident."""
        out_features, in_features = len(weight) // 2 if gated else len(weight), weight.shape[1]
        num_programs, shared_bytes = device_limits(weight.device)
        chunks, outs = -(-in_features // RESIDENT_CHUNK), resident_outs(out_features, num_programs)
        # `resident_gemm` copies weights in units of 16 bytes.
        if num_rows > MAX_SKINNY_ROWS or in_features % 8 or outs > MAX_RESIDENT_OUTS:
            return False
        # Shared memory holds all weights and inputs of a program.
        tile_rows = (2 if gated else 1) * triton.next_power_of_2(outs) + MAX_SKINNY_ROWS
        fits = chunks * RESIDENT_CHUNK * tile_rows * weight.element_size() <= shared_bytes
        # With norm and 2048 inputs at 8 rows Qwen3-1.7B's QKV takes 8.0 us, and 7.7 as norm and `skinny_gemm`.
        return bool(fits and chunks <= (1 if normed or gated else 3))

    def uses_splitk(self, num_rows: int, weight: torch.Tensor, gated: bool = False, parts: int = 1) -> bool:
        """Return whether `splitk_gemm` is supported and fastest: small weights, all programs resident at once."""
        small = num_rows <= MAX_SPLITK_ROWS and weight.shape[1] <= parts * _most_splitk_ins(num_rows, gated)
        return weight.element_size() == 2 and small and self.splitk_tile(num_rows, weight, gated, parts) is not None

    def splitk_tile(self, num_rows: int, weight: torch.Tensor, gated: bool, parts: int) -> SplitKTile | None:
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

    def uses_persistent(self, num_rows: int, weight: torch.Tensor) -> bool:
        """Return whether `persistent_gemm` supports the shapes, and tiles fill nine tenths of rounds of programs."""
        out_features, in_features = weight.shape
        is_even = in_features % PERSISTENT_INS == 0 and out_features % (2 * PERSISTENT_COLUMNS) == 0
        num_programs = device_limits(weight.device)[0]
        tiles = -(-num_rows // PERSISTENT_ROWS) * (out_features // (2 * PERSISTENT_COLUMNS))
        return weight.element_size() == 2 and is_even and tiles >= 0.9 * num_programs * -(-tiles // num_programs)

    def projects_qkv(self, num_rows: int, weight: torch.Tensor, head_dim: int) -> bool:
        """Return whether `persistent_qkv_rope_store` supports these shapes, and is faster than two kernels."""
        is_supported = is_hopper(weight.device) and head_dim == PERSISTENT_COLUMNS
        return is_supported and self.uses_persistent(num_rows, weight)

    def fuses_norm(self, num_rows: int) -> bool:
        """Return whether each of a mixer's products of the same rows normalises them, instead of a norm before both."""
        return num_rows <= MAX_SKINNY_ROWS

    def branch_end(self, num_rows: int, weight: torch.Tensor) -> LinearKernel | None:
        """Return the kernel of a branch's last product: CUBLAS adds the residual, SPLITK_GEMM leaves parts of the sum.

        None leaves the addition to the next norm, and the product to `linear`.
        """
        if not uses_triton(weight.device) or weight.element_size() != 2 or num_rows <= MAX_SKINNY_ROWS:
            return None
        if is_hopper(weight.device) and self.uses_splitk(num_rows, weight, parts=SPLITK_PARTS):
            return LinearKernel.SPLITK_GEMM
        return LinearKernel.CUBLAS

    def fp8_linear(self, num_rows: int, dtype: torch.dtype, weight: Fp8Matrix) -> LinearKernel:
        """Return the kernel for rows of a dtype and e4m3 weights."""
        device = weight.values.device
        if self.rounds_rows(num_rows, dtype, device):
            is_large = num_rows > MAX_OWN_FP8_ROWS and dtype == torch.bfloat16
            return LinearKernel.SCALED_MM if is_large and supports_scaled_mm(weight) else LinearKernel.SCALED_GEMM
        if not uses_triton(device):
            return LinearKernel.CUBLAS
        if num_rows == 1:
            return LinearKernel.GEMV
        is_skinny = num_rows <= MAX_SKINNY_ROWS and dtype.itemsize == 2
        return LinearKernel.SKINNY_GEMM if is_skinny else LinearKernel.CUBLAS

    def four_bit_linear(self, num_rows: int, dtype: torch.dtype, weight: FourBitMatrix) -> LinearKernel:
        """Return the kernel for rows of a dtype and weights in four bits."""
        if num_rows <= MAX_SKINNY_ROWS and self.uses_skinny_four_bits(dtype, weight):
            return LinearKernel.SKINNY_FOUR_BIT_GEMM
        if num_rows <= MAX_HOPPER_FOUR_BIT_ROWS and self.uses_hopper_four_bits(dtype, weight):
            return LinearKernel.HOPPER_FOUR_BIT_GEMM
        most = MAX_FOUR_BIT_ROWS * (2 if weight.values.shape[-2] > _MANY_FOUR_BIT_OUTS else 1)
        is_own = num_rows <= most and dtype.itemsize == 2 and uses_triton(weight.values.device)
        return LinearKernel.FOUR_BIT_GEMM if is_own else LinearKernel.CUBLAS

    def uses_skinny_four_bits(self, dtype: torch.dtype, weight: FourBitMatrix) -> bool:
        """Return whether `skinny_four_bit_gemm` supports rows of a dtype and the weight's inputs and groups."""
        # Triton's interpreter, without limits of a device, cannot run it.
        is_device = uses_triton(weight.values.device) and device_limits(weight.values.device)[0] > 0
        has_runs = weight.in_features % 32 == 0 and (weight.format != "int4" or weight.group >= 32)
        return is_device and dtype.itemsize == 2 and has_runs

    def uses_hopper_four_bits(self, dtype: torch.dtype, weight: FourBitMatrix) -> bool:
        """Return whether `hopper_four_bit_gemm` supports rows of a dtype and the weight's inputs and groups."""
        return is_hopper(weight.values.device) and self.uses_skinny_four_bits(dtype, weight)

    def four_bit_parts(self, num_rows: int, dtype: torch.dtype, weight: FourBitMatrix) -> int:
        """Return the parts in which a layer's sums are left to the next norm by kernels that can; 1 for sums.

        One row's norm is a part of the next product, which adds up no parts.
        """
        kernel = self.four_bit_linear(num_rows, dtype, weight)
        can = kernel in (LinearKernel.SKINNY_FOUR_BIT_GEMM, LinearKernel.HOPPER_FOUR_BIT_GEMM)
        # Parts have whole steps and groups.
        is_even = weight.in_features % (SPLITK_PARTS * weight.unit(FP8_INS)) == 0
        few_outs = weight.values.shape[-2] <= _MANY_FOUR_BIT_OUTS
        if num_rows == 1 or num_rows > MAX_SPLITK_ROWS or not (can and is_even and few_outs):
            return 1
        return SPLITK_PARTS if num_rows <= MAX_SPLITK_ROWS // 2 else SPLITK_PARTS // 2

    def rounds_rows(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether rows are rounded to e4m3 beside weights of e4m3, and multiplied in 8 bits."""
        return num_rows > MAX_SKINNY_ROWS and dtype.itemsize == 2 and uses_triton(device) and converts_e4m3(device)

    def rounds_gate_up(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether gate and up are activated where the product that follows rounds them to e4m3."""
        return num_rows > MAX_GATED_ROWS and self.rounds_rows(num_rows, dtype, device)

    def fp8_parts(self, num_rows: int, dtype: torch.dtype, weight: Fp8Matrix) -> int:
        """Return the parts in which `scaled_gemm` leaves the sums of a layer to the next norm; 1 for whole sums.

        Then it is chosen for up to MAX_SPLIT_FP8_ROWS rows instead of `torch._scaled_mm`.
        """
        is_own = self.fp8_linear(num_rows, dtype, weight) is LinearKernel.SCALED_GEMM
        num_steps = -(-weight.values.shape[1] // FP8_INS)
        few = num_rows <= (MAX_SPLITK_ROWS if is_own else MAX_SPLIT_FP8_ROWS)
        return SPLITK_PARTS if few and num_steps % SPLITK_PARTS == 0 else 1

    def experts(self, num_tokens: int) -> ExpertsKernel:
        """Return the kernel for the experts of some tokens, on devices with Triton."""
        if num_tokens == 1:
            return ExpertsKernel.EXPERT_GEMV
        return ExpertsKernel.EXPERT_GEMM if num_tokens <= MAX_EXPERT_ROWS else ExpertsKernel.GROUPED_GEMM

    def expert_rows(self, num_experts: int, top_k: int) -> tuple[int, ...]:
        """Return the numbers of rows at which the choice of the experts' kernels or of their tiles changes."""
        tiles = [most * num_experts // top_k + 1 for most in EXPERT_TILE_ROWS]
        return 1, 2, MAX_EXPERT_ROWS + 1, *(rows for rows in tiles if rows > MAX_EXPERT_ROWS + 1)

    def rows_per_expert(self, num_routed: int, num_experts: int) -> float:
        """Return the rows of an expert for which `grouped_gemm` takes its tile; num_routed: rows of all experts."""
        return num_routed / num_experts

    def single_split(self, num_kv_heads: int, seq_lens: np.ndarray) -> bool:
        """Return whether `hopper_decode` is faster with a single split for each context; seq_lens: [num_seqs].

        It is unless the longest context takes longer than reading all at full bandwidth and merging their splits.
        """
        # A single short context would gain 1% until it has grown, which is not worth a second CUDA graph.
        if len(seq_lens) == 1:
            return False
        evenly = int(seq_lens.sum()) * num_kv_heads // _PROGRAMS_FOR_BANDWIDTH
        return int(seq_lens.max(initial=0)) <= evenly + _FREE_TOKENS

    def context_shares(self, num_seqs: int, at_once: int) -> int:
        """Return the `shares` of `split_contexts` for decode rows; at_once: programs of a KV head that run at once."""
        # Rounding can give each sequence one extra split; few sequences' splits must all be resident at once.
        return at_once - num_seqs if 2 * num_seqs <= at_once else at_once

    def has_few_seqs(self, num_seqs: int) -> bool:
        """Return whether `decode_attention` takes smaller tiles and fewer programs."""
        return num_seqs <= FEW_SEQS

    def widens_contexts(self, num_context_tokens: int, num_tokens: int) -> bool:
        """Return whether chunks of `num_tokens` tokens attend faster to contexts in e4m3 that are widened before."""
        return num_context_tokens <= _MAX_WIDENED * num_tokens

    def all_reduces_at_once(self, num_rows: int, num_bytes: int, num_ranks: int) -> bool:
        """Return whether each rank sends all its rows to all others (one-shot), or sums of a share (two-shot)."""
        return num_rows < num_ranks or num_bytes * (num_ranks - 1) <= _ONE_SHOT_BYTES


FASTEST = KernelPolicy()
