"""All-reduces over GPUs that map each other's memory: with residual addition and RMSNorm, and of sampled tokens.

One-shot, for few rows: every rank sends its rows to every rank, which sums them. Two-shot: each rank sums the rows that
it owns and sends the sums to the others. Sums are in rank order, so all ranks get the same bits. A rank writes into the
other ranks' symmetric buffers and reads its own, where it waits for the call's number, sent in one of two ways:

- Words of 8 bytes, one-shot: 4 of data and 4 of the call number, one way over the link without fence or barrier, for
  twice the bytes (NCCL's LL protocol; Hu et al. 2025, arXiv:2507.04786). A relaxed access of system scope to 8 bytes is
  one also for another GPU (PTX ISA, "Memory Consistency Model").
- Rows of plain data, two-shot, each followed by a signal: an int32 that is set to the call number.

A call number comes from a step counter on the device and the call's index in its step, so that CUDA graphs can be
replayed. Numbers are positive, as unwritten memory carries 0, and none occurs twice, as a word of its first call would
pass for one of the second: after `max_steps` steps the buffers are cleared, and the counter starts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanovllm.kernels._triton import INTERPRETED as _INTERPRETED
from nanovllm.kernels._triton import converts_e4m3, jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.fast_math import pack_pair, rsqrt
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, store_rounded
from nanovllm.kernels.rms_norm import Norm

_TOKEN_MASK = 2**31 - 1
_ROWS_PER_PROGRAM = 32
"""Rows of a program of the argmax."""
ABORT_CHECK_SPINS = 2**15
"""Reads of the buffer, about ten milliseconds, between two of the abort word, which is in host memory: with 1024, a
call with one rank 300 us late took 10.6 ms, since a thousand waiting programs read it at once over the bus."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's view of the symmetric buffers.

    Each rank's buffer has `num_bytes` bytes, initially zero, with separate halves for even and odd calls.

    Attributes:
        rank, num_ranks: this rank, and the number of ranks.
        word_bytes: maximum bytes of activations in a call that sends words, with rows of whole pairs.
        row_bytes: bytes for activations in a call that sends rows, including `num_ranks` extra rows.
        max_rows: maximum rows of a call that sends rows.
        max_candidates: maximum rows of `all_reduce_argmax`.
        addresses: [num_ranks] int64, on the device; address of each rank's buffer.
        step: [1] int32, on the device; number of steps since the buffers were cleared, from 1 on in a step.
        calls_per_step: exceeds the number of calls of any step. Both are odd, or both even, so that consecutive calls,
            also of two steps, use different halves.
        abort: [1] int32, in pinned host memory; when set, all waits end, with undefined results.
    """

    rank: int
    num_ranks: int
    word_bytes: int
    row_bytes: int
    max_rows: int
    max_candidates: int
    addresses: torch.Tensor
    step: torch.Tensor
    calls_per_step: int
    abort: torch.Tensor

    @property
    def max_steps(self) -> int:
        """Steps whose call numbers, up to `(max_steps + 1) * calls_per_step - 1`, are below 2**31."""
        return 2**31 // self.calls_per_step - 1

    @cached_property
    def rows_offset(self) -> int:
        """Offset of rows, [2, contributions and results, row_bytes]; before them are words, [2, num_ranks, ...]."""
        return 2 * self.num_ranks * 2 * self.word_bytes

    @cached_property
    def signals_offset(self) -> int:
        """Offset of the rows' signals, [2, num_ranks + 1, max_rows] int32; the results' signals come last."""
        return self.rows_offset + 2 * 2 * self.row_bytes

    @cached_property
    def candidates_offset(self) -> int:
        """Offset of the candidates of `all_reduce_argmax`, [2, num_ranks, max_candidates, 2] words."""
        return self.signals_offset + 2 * (self.num_ranks + 1) * self.max_rows * 4

    @cached_property
    def num_bytes(self) -> int:
        """Size of a buffer."""
        return self.candidates_offset + 2 * self.num_ranks * self.max_candidates * 2 * 8


@jit
def buffer_address(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Return a pointer to `dtype` at byte `offset`, a multiple of 16, of a rank's buffer."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype)), 16)


@jit
def send_words(buffer_ptr, pairs, first, second, mask, call):
    """Store two words of 4 bytes of data and the call number at each of `pairs`, offsets in units of 16 bytes."""
    ptrs, number = buffer_ptr + 2 * pairs, call.to(tl.int64) << 32
    first, second = number | (first.to(tl.int64) & 0xFFFFFFFF), number | (second.to(tl.int64) & 0xFFFFFFFF)
    if _INTERPRETED:
        tl.store(ptrs, first, mask=mask)
        tl.store(ptrs + 1, second, mask=mask)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred known;
            setp.ne.u32 known, $4, 0;
            @known st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
            mov.u32 $0, 0;
            }""",
            "=r,l,l,l,r", [ptrs.to(tl.int64), first, second, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def _load_words(ptrs, mask, none):
    if _INTERPRETED:
        return (
            tl.load(ptrs, mask=mask, other=none, volatile=True),
            tl.load(ptrs + 1, mask=mask, other=none, volatile=True),
        )
    return tl.inline_asm_elementwise(
        """{
        .reg .pred known;
        setp.ne.u32 known, $3, 0;
        mov.u64 $0, $4;
        mov.u64 $1, $4;
        @known ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];
        }""",
        "=&l,=&l,l,r,l", [ptrs.to(tl.int64), mask.to(tl.int32), none], (tl.int64, tl.int64), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def receive_words(buffer_ptr, pairs, mask, call, abort_ptr, CHECK: tl.constexpr):
    """Wait until all words of the pairs carry the call number, and return the data of each pair's two."""
    ptrs, none = buffer_ptr + 2 * pairs, call.to(tl.int64) << 32
    first, second = _load_words(ptrs, mask, none)
    # Of a word of the call nothing but data is left.
    waiting = tl.max((((first ^ none) | (second ^ none)) >> 32 != 0).to(tl.int32), axis=0)
    spins = 0
    while waiting != 0:
        first, second = _load_words(ptrs, mask, none)
        waiting = tl.max((((first ^ none) | (second ^ none)) >> 32 != 0).to(tl.int32), axis=0)
        spins += 1
        if spins % CHECK == 0:
            waiting = tl.where(tl.load(abort_ptr, volatile=True) != 0, 0, waiting)
    return first.to(tl.int32), second.to(tl.int32)


@jit
def set_signal(addresses_ptr, rank, offset, call):
    """Set the signal at byte `offset` of a rank's buffer, by a store in release order: many PCIe peers lack atomics."""
    signal_ptr = (tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    if _INTERPRETED:
        tl.store(signal_ptr, call)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [signal_ptr.to(tl.int64), call], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def _load_acquire(signal_ptr):
    if _INTERPRETED:
        return tl.load(signal_ptr, volatile=True)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [signal_ptr.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@jit
def wait_signal(signal_ptr, call, abort_ptr, CHECK: tl.constexpr):
    """Wait until a signal in this rank's buffer is set; the data stored before it can then be read."""
    seen = _load_acquire(signal_ptr)
    spins = 0
    while seen != call:
        seen = _load_acquire(signal_ptr)
        spins += 1
        if spins % CHECK == 0:
            seen = tl.where(tl.load(abort_ptr, volatile=True) != 0, call, seen)


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
    if dtype.primitive_bitwidth == 16:
        return pack_pair(first, second, dtype)
    return first.to(tl.int32, bitcast=True)


@jit
def _load_weight(weight_ptr, offsets, mask, dtype: tl.constexpr):
    """Return the weights of the values in each word of a row of `dtype`; they may be kept in float32."""
    # One return: what follows one in a branch is compiled, too.
    if weight_ptr.dtype.element_ty == dtype:
        words = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + offsets, mask=mask, other=0)
        first, second = _unpack(words, dtype)
    else:
        pairs = weight_ptr + 2 * offsets
        first, second = tl.load(pairs, mask=mask, other=0.0), tl.load(pairs + 1, mask=mask, other=0.0)
    return first, second


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
    weight_first, weight_second = _load_weight(weight_ptr, offsets, mask, dtype)
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
    x: torch.Tensor, norm: Norm, residual: torch.Tensor | None, buffer: SymmetricBuffer, call_in_step: int,
    one_shot: bool, out: tuple[torch.Tensor | Fp8Rows, torch.Tensor],
) -> None:  # fmt: skip
    """Sum the ranks' x, add the residual, and normalise; every rank makes the same calls in the same order.

    The next call but one reuses this call's half of the buffer, which all ranks have read by the call in between.

    Args:
        x: [num_rows, size], contiguous; this rank's summand.
        norm, residual: see `rms_norm`; the same on every rank.
        buffer, call_in_step: this rank's, and the index of the call in its step, below `calls_per_step`.
        one_shot: the same on every rank; x must fit. Two-shot needs `num_ranks` rows, so that every rank takes part.
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


def pack_candidates(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Pack a score and its token id into an int64 whose maximum has the largest score and, of ties, the lowest id.

    The bits of floats, read as integers, have the order of non-negative floats, and the reverse order of negative ones.
    """
    # Makes -0.0 and 0.0 the same bits.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _TOKEN_MASK, bits)
    return (ordered.long() << 32) | (_TOKEN_MASK - token_ids)


def unpack_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Return the token ids of keys from `pack_candidates`."""
    return _TOKEN_MASK - (keys & _TOKEN_MASK)


@jit(do_not_specialize=["call_in_step"])
def _all_reduce_argmax_kernel(
    scores_ptr, token_ids_ptr, out_ptr, addresses_ptr, step_ptr, abort_ptr, num_rows, offset, max_rows,
    call_in_step, calls_per_step,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    wait_for_previous(PDL)
    call = tl.load(step_ptr) * calls_per_step + call_in_step
    half_offset = (call & 1).to(tl.int64) * (RANKS * 2 * max_rows)
    score = tl.load(scores_ptr + rows, mask=mask, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    high = tl.where(bits < 0, bits ^ MASK, bits)
    low = MASK - tl.load(token_ids_ptr + rows, mask=mask, other=0).to(tl.int32)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            buffer_ptr = buffer_address(addresses_ptr, rank, offset, tl.int64) + half_offset + RANK * 2 * max_rows
            send_words(buffer_ptr, rows, high, low, mask, call)
    best = (high.to(tl.int64) << 32) | low
    own = buffer_address(addresses_ptr, RANK, offset, tl.int64) + half_offset
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            high, low = receive_words(own + rank * 2 * max_rows, rows, mask, call, abort_ptr, CHECK)
            best = tl.maximum(best, (high.to(tl.int64) << 32) | low)
    tl.store(out_ptr + rows, MASK - (best & MASK), mask=mask)


def all_reduce_argmax(
    scores: torch.Tensor, token_ids: torch.Tensor, buffer: SymmetricBuffer, call_in_step: int
) -> torch.Tensor:
    """Return for each row the token id of the largest score on any rank, [num_rows] int64; ties: the lowest id.

    Every rank calls it, and between two calls `all_reduce_rms_norm`. `scores`: [num_rows] float32, contiguous, none
    NaN; `token_ids`: [num_rows] int64, contiguous, below 2**31; call_in_step: the index of the call among the step's
    calls of this function, below `calls_per_step`.
    """
    num_rows = len(scores)
    assert scores.is_contiguous() and token_ids.is_contiguous() and num_rows <= buffer.max_candidates
    out = torch.empty_like(token_ids)
    _all_reduce_argmax_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        scores, token_ids, out, buffer.addresses, buffer.step, buffer.abort, num_rows, buffer.candidates_offset,
        buffer.max_candidates, call_in_step, buffer.calls_per_step, RANK=buffer.rank, RANKS=buffer.num_ranks,
        ROWS=_ROWS_PER_PROGRAM, MASK=_TOKEN_MASK, CHECK=ABORT_CHECK_SPINS, num_warps=1, **pdl_options(scores.device),
    )  # fmt: skip
    return out
