"""Symmetric buffers, which the GPUs of one engine map of each other, and the protocols to send data through them.

Every rank writes into the other ranks' buffers and reads only its own. The receiver waits for the call's number, which
is sent in one of two ways:

- Words of 8 bytes: 4 of data and 4 of the call number. The latency is one way over the link, without fence or
  barrier, for twice the bytes (NCCL's LL protocol; Hu et al. 2025, arXiv:2507.04786). They are written and read in
  pairs, by relaxed accesses of system scope: such an access to 8 bytes is one also for another GPU (PTX ISA, "Memory
  Consistency Model").
- Rows of plain data, each followed by a signal: an int32 that is set to the call number.

A call number is computed from a step counter on the device and the call's index in its step, so that CUDA graphs can
be replayed. Numbers are positive: unwritten memory carries 0. A number must not occur twice, as a word that is
left of its first call would pass for one of the second; so after `max_steps` steps the buffers are cleared, and the
counter starts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanovllm.kernels._triton import INTERPRETED, jit, tl

# Triton's interpreter cannot run inline assembly.
_INTERPRETED = tl.constexpr(INTERPRETED)
ABORT_CHECK_SPINS = 2**15
"""Reads of the buffer between two reads of the abort word, about ten milliseconds.

The abort word is in host memory, and a thousand waiting programs read it at once over the bus: with 1024 reads in
between, a call with one rank 300 us late took 10.6 ms. Longer intervals delay the end of a wait for a dead rank.
"""


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
    """Load two words at each pointer by relaxed accesses, or `none` where the mask is false."""
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
    """Set the signal at byte `offset` of a rank's buffer, after all that this program has stored there.

    It is a store with release order, because many PCIe peers do not support atomics.
    """
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
    """Load a signal with acquire order."""
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
