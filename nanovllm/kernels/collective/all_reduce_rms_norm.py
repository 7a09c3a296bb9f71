"""All-reduce over GPUs that map each other's memory, fused with residual addition and RMSNorm.

One-shot, for few rows: every rank sends its rows to every rank, as words, and each rank sums them. Two-shot: each rank
sums the rows that it owns and sends the sums to the others, as rows with signals. Sums are in rank order, so all ranks
get the same bits. The normalised rows may be rounded to e4m3, for a product that takes them so.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import converts_e4m3, jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.collective.symmetric_buffer import (
    ABORT_CHECK_SPINS,
    SymmetricBuffer,
    buffer_address,
    receive_words,
    send_words,
    set_signal,
    wait_signal,
)
from nanovllm.kernels.fast_math import pack_pair, rsqrt
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, store_rounded
from nanovllm.kernels.rms_norm import Norm, rms_norm_ref


def all_reduce_rms_norm_ref(
    parts: list[torch.Tensor], norm: Norm, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `all_reduce_rms_norm`; `parts` are the x of all ranks."""
    total = torch.stack(parts).float().sum(0)
    if residual is not None:
        total += residual.float()
    return rms_norm_ref(total.to(parts[0].dtype), norm.weight, norm.eps)


@jit
def _unpack(words, dtype: tl.constexpr):
    """Return the two float32 values of each 4-byte word; of a float32 word the second is zero."""
    if dtype.primitive_bitwidth == 16:
        first = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    return first, second


@jit
def _pack(first, second, dtype: tl.constexpr):
    """Pack two float32 values into words of `dtype`; the inverse of `_unpack`."""
    if dtype.primitive_bitwidth == 16:
        return pack_pair(first, second, dtype)
    return first.to(tl.int32, bitcast=True)


@jit(do_not_specialize=["call_in_step"])
def _one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, addresses_ptr, step_ptr, abort_ptr, eps, size, capacity,
    call_in_step, calls_per_step,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHECK: tl.constexpr,
    PDL: tl.constexpr,
    scale_ptr=None, scale_row_stride=0, scale_group_stride=0, GROUP: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    per_word: tl.constexpr = 32 // dtype.primitive_bitwidth
    word_pointer: tl.constexpr = tl.pointer_type(tl.int32)
    row = tl.program_id(0)
    words_per_row = size // per_word
    pairs_per_row = (words_per_row + 1) // 2
    offsets = tl.arange(0, BLOCK)
    pairs = tl.arange(0, BLOCK // 2)
    pair_mask = pairs < pairs_per_row
    mask = offsets < words_per_row
    weight = tl.load(weight_ptr.to(word_pointer) + offsets, mask=mask, other=0)
    wait_for_previous(PDL)
    call = tl.load(step_ptr) * calls_per_step + call_in_step
    row_offsets = row.to(tl.int64) * words_per_row + offsets
    mine = tl.load(x_ptr.to(word_pointer) + row_offsets, mask=mask, other=0)
    buffer_ptr = buffer_address(addresses_ptr, RANK, 0, tl.int64)
    pairs += (call & 1).to(tl.int64) * (RANKS * capacity) + row.to(tl.int64) * pairs_per_row
    first = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr.to(word_pointer) + row_offsets, mask=mask, other=0)
        first, second = _unpack(residual, dtype)
    first_words, second_words = tl.split(tl.reshape(mine, [BLOCK // 2, 2]))
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            peer_ptr = buffer_address(addresses_ptr, rank, 0, tl.int64)
            send_words(peer_ptr, pairs + RANK * capacity, first_words, second_words, pair_mask, call)
    for rank in tl.static_range(RANKS):
        words = mine
        if rank != RANK:
            received = receive_words(buffer_ptr, pairs + rank * capacity, pair_mask, call, abort_ptr, CHECK)
            words = tl.interleave(received[0], received[1])
        part_first, part_second = _unpack(words, dtype)
        first += part_first
        second += part_second
    words = _pack(first, second, dtype)
    tl.store(total_ptr.to(word_pointer) + row_offsets, words, mask=mask)
    # The norm reads the rounded sum, which is what the next layer adds to.
    first, second = _unpack(words, dtype)
    scale = rsqrt(tl.sum(first * first + second * second, axis=0) / size + eps)
    weight_first, weight_second = _unpack(weight, dtype)
    out = _pack(first * scale * weight_first, second * scale * weight_second, dtype)
    if GROUP:
        first, second = _unpack(out, dtype)
        values = tl.reshape(tl.interleave(first, second), [2 * BLOCK // GROUP, GROUP])
        out_ptr += row.to(tl.int64) * size
        store_rounded(values, out_ptr, scale_ptr + row * scale_row_stride, 0, size, scale_group_stride, NATIVE)
    else:
        tl.store(out_ptr.to(word_pointer) + row_offsets, out, mask=mask)


@jit(do_not_specialize=["call_in_step"])
def _two_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, addresses_ptr, step_ptr, abort_ptr, eps, size,
    rows_offset, row_bytes, signals_offset, max_rows, call_in_step, calls_per_step,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHECK: tl.constexpr,
    PDL: tl.constexpr,
    scale_ptr=None, scale_row_stride=0, scale_group_stride=0, GROUP: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    call = tl.load(step_ptr) * calls_per_step + call_in_step
    half = (call & 1).to(tl.int64)
    contributions = rows_offset + half * 2 * row_bytes
    results = contributions + row_bytes
    signals = signals_offset + half * (RANKS + 1) * max_rows * 4
    row_offsets = row.to(tl.int64) * size + offsets
    mine = tl.load(x_ptr + row_offsets, mask=mask, other=0.0)
    owner = row % RANKS
    # The ranks' contributions to a row are adjacent, in rank order.
    sent_offsets = (row // RANKS * RANKS).to(tl.int64) * size + offsets
    own_signals = buffer_address(addresses_ptr, RANK, signals, tl.int32) + row
    if owner != RANK:
        tl.store(
            buffer_address(addresses_ptr, owner, contributions, dtype) + RANK * size + sent_offsets, mine, mask=mask
        )
        set_signal(addresses_ptr, owner, signals + (RANK * max_rows + row) * 4, call)
        wait_signal(own_signals + RANKS * max_rows, call, abort_ptr, CHECK)
        result_ptrs = buffer_address(addresses_ptr, RANK, results, dtype) + row_offsets
        rounded = tl.load(result_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + row_offsets, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                total += mine.to(tl.float32)
            else:
                wait_signal(own_signals + rank * max_rows, call, abort_ptr, CHECK)
                part_ptrs = buffer_address(addresses_ptr, RANK, contributions, dtype) + rank * size + sent_offsets
                total += tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        rounded = total.to(dtype)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.store(buffer_address(addresses_ptr, rank, results, dtype) + row_offsets, rounded, mask=mask)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                set_signal(addresses_ptr, rank, signals + (RANKS * max_rows + row) * 4, call)
    tl.store(total_ptr + row_offsets, rounded, mask=mask)
    # The norm reads the rounded sum, which is what the next layer adds to.
    wide = rounded.to(tl.float32)
    scale = rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    out = (wide * scale * weight).to(dtype)
    if GROUP:
        values = tl.reshape(out.to(tl.float32), [BLOCK // GROUP, GROUP])
        out_ptr += row.to(tl.int64) * size
        store_rounded(values, out_ptr, scale_ptr + row * scale_row_stride, 0, size, scale_group_stride, NATIVE)
    else:
        tl.store(out_ptr + row_offsets, out, mask=mask)


def whole_pairs(row_bytes: int) -> int:
    """Return the bytes of a row whose words are sent in pairs."""
    return -(-row_bytes // 8) * 8


def fits(x: torch.Tensor, buffer: SymmetricBuffer, one_shot: bool) -> bool:
    """Return whether x fits into the symmetric buffer and, for one-shot, its rows are whole words."""
    num_rows, row_bytes = len(x), x.shape[1] * x.element_size()
    if one_shot:
        return row_bytes % 4 == 0 and num_rows * whole_pairs(row_bytes) <= buffer.word_bytes
    # The last group of `num_ranks` rows takes the space of a whole group, even if it has fewer rows.
    return num_rows <= buffer.max_rows and (num_rows + buffer.num_ranks) * row_bytes <= buffer.row_bytes


def all_reduce_rms_norm(
    x: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor | None,
    buffer: SymmetricBuffer,
    call_in_step: int,
    one_shot: bool,
    out: tuple[torch.Tensor | Fp8Rows, torch.Tensor],
) -> None:
    """Sum the ranks' x, add the residual, and normalise; every rank makes the same calls in the same order.

    Args:
        x: [num_rows, size], contiguous; this rank's summand.
        norm: weight, [size], and epsilon.
        residual: [num_rows, size], contiguous, the same on every rank; None for zero.
        buffer: this rank's view of the symmetric buffers. The next call but one reuses this call's half of the buffer;
            by then all ranks have read it, because all took part in the call in between.
        call_in_step: index of the call in its step, below `calls_per_step`.
        one_shot: which algorithm, the same on every rank; x must fit. Two-shot needs at least `num_ranks` rows, so
            that every rank takes part.
        out: filled with the normalised rows, perhaps rounded to e4m3 if x has 16 bits, and with the sum; contiguous, in
            x's dtype, and the same on every rank.
    """
    num_rows, size = x.shape
    assert x.is_contiguous() and (residual is None or residual.is_contiguous()) and fits(x, buffer, one_shot)
    assert one_shot or num_rows >= buffer.num_ranks
    normed, total = out
    words = max(2, triton.next_power_of_2(size * x.element_size() // 4))
    options = {
        "RANK": buffer.rank, "RANKS": buffer.num_ranks, "HAS_RESIDUAL": residual is not None,
        "CHECK": ABORT_CHECK_SPINS, "num_warps": min(8, max(1, words // 256)),
    } | pdl_options(x.device)  # fmt: skip
    if isinstance(normed, Fp8Rows):
        assert x.element_size() == 2
        strides = normed.scales.stride()
        options |= {
            "scale_ptr": normed.scales, "scale_row_stride": strides[0], "scale_group_stride": strides[1],
            "GROUP": triton.next_power_of_2(normed.group), "NATIVE": converts_e4m3(x.device),
        }  # fmt: skip
        normed = normed.values.view(torch.uint8)
    if one_shot:
        _one_shot_kernel[(num_rows,)](
            x, residual, norm.weight, normed, total, buffer.addresses, buffer.step, buffer.abort, norm.eps, size,
            buffer.word_bytes // 8, call_in_step, buffer.calls_per_step, BLOCK=words, **options,
        )  # fmt: skip
    else:
        _two_shot_kernel[(num_rows,)](
            x, residual, norm.weight, normed, total, buffer.addresses, buffer.step, buffer.abort, norm.eps, size,
            buffer.rows_offset, buffer.row_bytes, buffer.signals_offset, buffer.max_rows, call_in_step,
            buffer.calls_per_step, BLOCK=triton.next_power_of_2(size), **options,
        )  # fmt: skip
