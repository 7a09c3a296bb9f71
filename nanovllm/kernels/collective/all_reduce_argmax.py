"""All-reduce of sampled tokens: the token with the largest score of all ranks; ties take the lowest id."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
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


@jit
def _all_reduce_argmax_kernel(
    scores_ptr, token_ids_ptr, out_ptr, addresses_ptr, step_ptr, abort_ptr, num_rows, offset, max_rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, CHECK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    wait_for_previous(PDL)
    # There is at most one call per step, so the step's number identifies it.
    call = tl.load(step_ptr)
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


def all_reduce_argmax(scores: torch.Tensor, token_ids: torch.Tensor, buffer: SymmetricBuffer) -> torch.Tensor:
    """Return for each row the token id of the largest score on any rank, [num_rows] int64; ties: the lowest id.

    Every rank calls it, at most once per step; between two calls all ranks must have called `all_reduce_rms_norm`.

    Args:
        scores: [num_rows] float32, contiguous, none NaN.
        token_ids: [num_rows] int64, contiguous, below 2**31.
        buffer: this rank's view of the symmetric buffers.
    """
    num_rows = len(scores)
    assert scores.is_contiguous() and token_ids.is_contiguous() and num_rows <= buffer.max_candidates
    out = torch.empty_like(token_ids)
    _all_reduce_argmax_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        scores, token_ids, out, buffer.addresses, buffer.step, buffer.abort, num_rows, buffer.candidates_offset,
        buffer.max_candidates, RANK=buffer.rank, RANKS=buffer.num_ranks, ROWS=_ROWS_PER_PROGRAM, MASK=_TOKEN_MASK,
        CHECK=ABORT_CHECK_SPINS, num_warps=1, **pdl_options(scores.device),
    )  # fmt: skip
    return out
