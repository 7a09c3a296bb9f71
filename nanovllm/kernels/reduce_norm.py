"""All-reduce over GPUs that map each other's memory, with the residual addition and the RMS norm that follow.

A message is a row of activations. It goes as words of 8 bytes, 4 of data and 4 of the call's number, which a receiver
reads until the number is right: no fence, no barrier, and one way over the link is all the latency there is (the LL
protocol of NCCL; Hu et al. 2025, arXiv:2507.04786). Numbers are of a step, counted on the device, and of the call in
it, so a captured graph can be replayed.

Few rows go to every rank, which adds them up (one-shot). Of many, each rank adds up its share and tells the others the
sum (two-shot), which is less to send. The order of summation is the ranks', so all of them get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, pdl_options, tl, triton
from nanovllm.kernels.rms_norm import rms_norm_ref

_ABORT_CHECK_SPINS = 1024


@dataclass(frozen=True)
class Mailboxes:
    """One rank's view of the memory that the ranks share.

    A mailbox is [2, num_ranks + 1, capacity] int64: for even and odd calls, what each rank sent, and, last, the sums.

    Attributes:
        rank, num_ranks: this one, and how many.
        capacity: words of one message: 4 bytes of activations each.
        addresses: [num_ranks] int64, on the device; of each rank's mailbox.
        step: [1] int32, on the device; steps so far.
        calls_per_step: more than any step makes, and such that a step's last call and the next one's first are not both
            even or both odd.
        abort: [1] int32, in pinned host memory; set, it ends all waiting, with results of no meaning.
    """

    rank: int
    num_ranks: int
    capacity: int
    addresses: torch.Tensor
    step: torch.Tensor
    calls_per_step: int
    abort: torch.Tensor


def reduce_norm_ref(
    parts: list[torch.Tensor], weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `reduce_norm`, of all ranks' parts in one place."""
    total = torch.stack(parts).float().sum(0)
    if residual is not None:
        total += residual.float()
    return rms_norm_ref(total.to(parts[0].dtype), weight, eps)


@triton.jit
def _unpack(words, dtype: tl.constexpr):
    """The float32 values in words of 4 bytes: two of each, the second zero if there is room for one only."""
    if dtype.primitive_bitwidth == 16:
        first = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    return first, second


@triton.jit
def _pack(first, second, dtype: tl.constexpr):
    """What `_unpack` takes apart."""
    if dtype.primitive_bitwidth == 16:
        low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    return first.to(tl.int32, bitcast=True)


@triton.jit
def _send(addresses_ptr, to, offsets, words, mask, call):
    """Put words into a rank's mailbox."""
    mailbox = tl.load(addresses_ptr + to).to(tl.pointer_type(tl.int64))
    tl.store(mailbox + offsets, (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def _receive(mailbox, offsets, mask, call, abort_ptr, CHECK: tl.constexpr):
    """Wait for the words of a call and return them."""
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


@triton.jit(do_not_specialize=["call_in_step"])
def _reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, addresses_ptr, step_ptr, abort_ptr, eps, size, capacity,
    call_in_step, calls_per_step,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TWO_SHOT: tl.constexpr,
    CHECK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    per_word: tl.constexpr = 32 // dtype.primitive_bitwidth
    word_pointer: tl.constexpr = tl.pointer_type(tl.int32)
    row = tl.program_id(0)
    words_per_row = size // per_word
    offsets = tl.arange(0, BLOCK)
    mask = offsets < words_per_row
    weight = tl.load(weight_ptr.to(word_pointer) + offsets, mask=mask, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    call = tl.load(step_ptr) * calls_per_step + call_in_step
    row_offsets = row.to(tl.int64) * words_per_row + offsets
    mine = tl.load(x_ptr.to(word_pointer) + row_offsets, mask=mask, other=0)
    mailbox = tl.load(addresses_ptr + RANK).to(tl.pointer_type(tl.int64))
    box = (call & 1).to(tl.int64) * ((RANKS + 1) * capacity) + row_offsets
    owner = row % RANKS
    first = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr.to(word_pointer) + row_offsets, mask=mask, other=0)
        first, second = _unpack(residual, dtype)
    if TWO_SHOT and owner != RANK:
        _send(addresses_ptr, owner, box + RANK * capacity, mine, mask, call)
        words = _receive(mailbox, box + RANKS * capacity, mask, call, abort_ptr, CHECK)
    else:
        for rank in tl.static_range(RANKS):
            if rank != RANK and not TWO_SHOT:
                _send(addresses_ptr, rank, box + RANK * capacity, mine, mask, call)
        for rank in tl.static_range(RANKS):
            part = mine if rank == RANK else _receive(mailbox, box + rank * capacity, mask, call, abort_ptr, CHECK)
            part_first, part_second = _unpack(part, dtype)
            first += part_first
            second += part_second
        words = _pack(first, second, dtype)
        for rank in tl.static_range(RANKS):
            if rank != RANK and TWO_SHOT:
                _send(addresses_ptr, rank, box + RANKS * capacity, words, mask, call)
    tl.store(total_ptr.to(word_pointer) + row_offsets, words, mask=mask)
    # What is normalised is what is passed on, which is rounded.
    first, second = _unpack(words, dtype)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / size + eps)
    weight_first, weight_second = _unpack(weight, dtype)
    out = _pack(first * scale * weight_first, second * scale * weight_second, dtype)
    tl.store(out_ptr.to(word_pointer) + row_offsets, out, mask=mask)


def fits(x: torch.Tensor, boxes: Mailboxes) -> bool:
    """Whether `reduce_norm` can take rows like x: whole words, and no more than a mailbox holds."""
    row_bytes = x.shape[1] * x.element_size()
    return row_bytes % 4 == 0 and len(x) * row_bytes <= 4 * boxes.capacity


def reduce_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    boxes: Mailboxes,
    call_in_step: int,
    two_shot: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the ranks' x, add the residual, and normalise; every rank makes the same calls in the same order.

    Args:
        x: [num_rows, size], contiguous; this rank's part.
        weight: [size], of the norm.
        eps: added to the mean square.
        residual: [num_rows, size], contiguous, the same on every rank; or None for zero.
        boxes: where the ranks meet. Two calls after this one it is all read: by then every rank has taken part in one.
        call_in_step: number of the call, below `calls_per_step`.
        two_shot: send rows to the one that adds them up, rather than to all; the same on every rank.

    Returns:
        The normalised rows, and the sum, both in x's dtype and the same on every rank.
    """
    num_rows, size = x.shape
    assert x.is_contiguous() and (residual is None or residual.is_contiguous()) and fits(x, boxes)
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size * x.element_size() // 4)
    _reduce_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, boxes.addresses, boxes.step, boxes.abort, eps, size, boxes.capacity,
        call_in_step, boxes.calls_per_step,
        RANK=boxes.rank, RANKS=boxes.num_ranks, BLOCK=block, HAS_RESIDUAL=residual is not None, TWO_SHOT=two_shot,
        CHECK=_ABORT_CHECK_SPINS, num_warps=min(8, max(1, block // 256)), **pdl_options(x.device),
    )  # fmt: skip
    return out, total
