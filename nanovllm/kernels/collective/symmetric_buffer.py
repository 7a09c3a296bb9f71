"""Memory that the GPUs of one engine map of each other, and how messages go through it.

Every rank writes into the others' mailboxes and reads its own alone. A message carries the number of its call, for
which the receiver waits, in one of two ways:

- Words of 8 bytes, 4 of data and 4 of the number: no fence, no barrier, and one way over the link is all the latency
  there is, at twice the bytes (the LL protocol of NCCL; Hu et al. 2025, arXiv:2507.04786).
- Rows of plain data, and a flag for each that follows when the row has arrived.

Numbers are of a step, counted on the device, and of the call in it, so a captured graph can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanovllm.kernels._triton import INTERPRETED, jit, tl

# Triton's interpreter knows no instructions of the GPU's.
_INTERPRETED = tl.constexpr(INTERPRETED)
ABORT_CHECK_SPINS = 2**15
"""Reads of a mailbox between two looks at the abort flag, which is in the host's memory: some ten milliseconds.

A thousand waiting programs look at once, through the bus. With one rank 300 us late, a sum of 3277 rows took 10.6 ms
with 1024 reads between looks, and 0.4 ms with 2**17. Rarer looks end a wait later where a rank has died.
"""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's view of the memory that the ranks share.

    A mailbox is `num_bytes` bytes, which begin as zeros: everything twice, for even and odd calls.

    Attributes:
        rank, num_ranks: this one, and how many.
        word_bytes: most bytes of activations of a call that sends words.
        row_bytes: most bytes of activations of a call that sends rows, with room for `num_ranks` rows besides.
        max_rows: most rows of such a call.
        max_candidates: most rows of tokens to agree on.
        addresses: [num_ranks] int64, on the device; of each rank's mailbox.
        step: [1] int32, on the device; steps so far.
        calls_per_step: more than any step makes. It is odd, and so must be the number of calls of a step: then any two
            that follow one another use different halves of the mailbox.
        abort: [1] int32, in pinned host memory; set, it ends all waiting, with results of no meaning.
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

    @cached_property
    def rows_offset(self) -> int:
        """Where rows begin: [2, contributions and results, row_bytes]; before them are words, [2, num_ranks, ...]."""
        return 2 * self.num_ranks * 2 * self.word_bytes

    @cached_property
    def signals_offset(self) -> int:
        """Where their flags begin: [2, num_ranks + 1, max_rows] int32, the results' last."""
        return self.rows_offset + 2 * 2 * self.row_bytes

    @cached_property
    def candidates_offset(self) -> int:
        """Where tokens to agree on begin: [2, num_ranks, 2, max_candidates] words."""
        return self.signals_offset + 2 * (self.num_ranks + 1) * self.max_rows * 4

    @cached_property
    def num_bytes(self) -> int:
        """Size of a mailbox."""
        return self.candidates_offset + 2 * self.num_ranks * self.max_candidates * 2 * 8


@jit
def buffer_address(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """The address of elements of `dtype`, `offset` bytes, a multiple of 16, into a rank's mailbox."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype)), 16)


@jit
def send_words(mailbox, offsets, words, mask, call):
    """Put 4 bytes of data into each of a mailbox's words."""
    tl.store(mailbox + offsets, (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@jit
def receive_words(mailbox, offsets, mask, call, abort_ptr, CHECK: tl.constexpr):
    """Wait for the words of a call and return their data."""
    none = call.to(tl.int64) << 32
    packed = tl.load(mailbox + offsets, mask=mask, other=none, volatile=True)
    waiting = tl.max(((packed >> 32).to(tl.int32) != call).to(tl.int32), axis=0)
    spins = 0
    while waiting != 0:
        packed = tl.load(mailbox + offsets, mask=mask, other=none, volatile=True)
        waiting = tl.max(((packed >> 32).to(tl.int32) != call).to(tl.int32), axis=0)
        spins += 1
        if spins % CHECK == 0:
            waiting = tl.where(tl.load(abort_ptr, volatile=True) != 0, 0, waiting)
    return packed.to(tl.int32)


@jit
def set_signal(addresses_ptr, rank, offset, call):
    """Tell a rank, by a flag `offset` bytes into its mailbox, that what this program has stored there is there.

    A store with release order, which any two GPUs that map each other's memory know; many PCIe peers lack atomics.
    """
    flag_ptr = (tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    if _INTERPRETED:
        tl.store(flag_ptr, call)
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
            "=r,l,r", [flag_ptr.to(tl.int64), call], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def _load_acquire(flag_ptr):
    """Load a flag; what its writer stored before it can be read then."""
    if _INTERPRETED:
        return tl.load(flag_ptr, volatile=True)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag_ptr.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@jit
def wait_signal(flag_ptr, call, abort_ptr, CHECK: tl.constexpr):
    """Wait for a flag of this rank's mailbox; then what it stands for can be read."""
    seen = _load_acquire(flag_ptr)
    spins = 0
    while seen != call:
        seen = _load_acquire(flag_ptr)
        spins += 1
        if spins % CHECK == 0:
            seen = tl.where(tl.load(abort_ptr, volatile=True) != 0, call, seen)
