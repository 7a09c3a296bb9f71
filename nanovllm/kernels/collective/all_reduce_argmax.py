"""Which of the ranks' tokens is drawn: the one with the largest score, of equal ones the lowest."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.kernels.collective.symmetric_buffer import (
    ABORT_CHECK_SPINS,
    SymmetricBuffer,
    buffer_address,
    receive_words,
    send_words,
)

_TOKEN_MASK = 2**31 - 1
_ROWS_PER_PROGRAM = 32


def pack_candidates(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Make one int64 of a score and its token, ordered by score, then by falling token id, so that a maximum decides.

    A float's bits, read as an integer, are in the order of the floats where the sign is clear, and in the opposite
    order where it is set.
    """
    # Zeros of either sign are equal as scores; this leaves one of them.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _TOKEN_MASK, bits)
    return (ordered.long() << 32) | (_TOKEN_MASK - token_ids)


def unpack_tokens(keys: torch.Tensor) -> torch.Tensor:
    """The token ids that `pack_candidates` put into keys."""
    return _TOKEN_MASK - (keys & _TOKEN_MASK)


@jit
def _all_reduce_argmax_kernel(
    scores_ptr, token_ids_ptr, out_ptr, addresses_ptr, step_ptr, abort_ptr, num_rows, offset, max_rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # One call a step: the step's number is the call's.
    call = tl.load(step_ptr)
    box = (call & 1).to(tl.int64) * (RANKS * 2 * max_rows)
    score = tl.load(scores_ptr + rows, mask=mask, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    high = tl.where(bits < 0, bits ^ MASK, bits)
    low = MASK - tl.load(token_ids_ptr + rows, mask=mask, other=0).to(tl.int32)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            mailbox = buffer_address(addresses_ptr, rank, offset, tl.int64) + box + RANK * 2 * max_rows
            send_words(mailbox, rows, high, mask, call)
            send_words(mailbox, max_rows + rows, low, mask, call)
    best = (high.to(tl.int64) << 32) | low
    own = buffer_address(addresses_ptr, RANK, offset, tl.int64) + box
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            high = receive_words(own + rank * 2 * max_rows, rows, mask, call, abort_ptr, CHECK)
            low = receive_words(own + rank * 2 * max_rows, max_rows + rows, mask, call, abort_ptr, CHECK)
            best = tl.maximum(best, (high.to(tl.int64) << 32) | low)
    tl.store(out_ptr + rows, MASK - (best & MASK), mask=mask)


def all_reduce_argmax(scores: torch.Tensor, token_ids: torch.Tensor, boxes: SymmetricBuffer) -> torch.Tensor:
    """Return for each row the token of the largest score of any rank, [num_rows] int64; ties take the lowest id.

    At most once a step, on every rank; between two steps that do, the ranks must have met in `all_reduce_rms_norm`.

    Args:
        scores: [num_rows] float32, contiguous, none NaN.
        token_ids: [num_rows] int64, contiguous, below 2**31.
        boxes: where the ranks meet.
    """
    num_rows = len(scores)
    assert scores.is_contiguous() and token_ids.is_contiguous() and num_rows <= boxes.max_candidates
    out = torch.empty_like(token_ids)
    _all_reduce_argmax_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        scores, token_ids, out, boxes.addresses, boxes.step, boxes.abort, num_rows, boxes.candidates_offset,
        boxes.max_candidates, RANK=boxes.rank, RANKS=boxes.num_ranks, ROWS=_ROWS_PER_PROGRAM, MASK=_TOKEN_MASK,
        CHECK=ABORT_CHECK_SPINS, num_warps=1, **pdl_options(scores.device),
    )  # fmt: skip
    return out
