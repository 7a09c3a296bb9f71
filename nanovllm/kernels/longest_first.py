"""Sequences by the length of their contexts, so that work that is shared out as it comes ends with short pieces."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton

_BLOCK = 16
"""Sequences whose ranks one program finds."""


def longest_first_ref(context_lens: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `longest_first`."""
    return torch.sort(context_lens, descending=True, stable=True).indices.int()


@jit(do_not_specialize=["num_seqs"], unaligned=["context_lens_ptr"])
def _longest_first_kernel(
    context_lens_ptr, order_ptr, num_seqs, SEQS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seqs = tl.arange(0, SEQS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own_lens = tl.load(context_lens_ptr + own, mask=own < num_seqs, other=0)[:, None]
    lens = tl.load(context_lens_ptr + seqs, mask=seqs < num_seqs, other=0)[None, :]
    is_before = (lens > own_lens) | ((lens == own_lens) & (seqs[None, :] < own[:, None]))
    tl.store(order_ptr + tl.sum(is_before.to(tl.int32), axis=1), own, mask=own < num_seqs)


def longest_first_triton(context_lens: torch.Tensor) -> torch.Tensor:
    """Triton form of `longest_first`: a sequence's place is the number of those before it."""
    num_seqs = len(context_lens)
    order = torch.empty_like(context_lens)
    # The same for all but the largest batches, so that they need no kernel of their own.
    size = max(512, triton.next_power_of_2(num_seqs))
    _longest_first_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        context_lens, order, num_seqs, SEQS=size, BLOCK=_BLOCK, **pdl_options(context_lens.device)
    )
    return order


def longest_first(context_lens: torch.Tensor) -> torch.Tensor:
    """Order sequences by their contexts, the longest first, equal ones as they stand.

    Args:
        context_lens: [num_seqs] int32, at least 1 each.

    Returns:
        Their indices, [num_seqs] int32.
    """
    return (longest_first_triton if context_lens.is_cuda else longest_first_ref)(context_lens)
