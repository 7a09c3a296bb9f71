"""How decode attention's work is shared out among its programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.kernels.prefix_attention import PrefixPlan, SharedPrefixes, plan_prefixes


@dataclass
class DecodePlan:
    """What all layers of a step share.

    Attributes:
        tile: tokens of a tile.
        early: whether programs load their first tile before they wait.
        tile_ends: [num_seqs] int32; tiles of the sequences up to each, its own included.
        partial: [2 * num_programs, group, head_dim] float32; unfinished outputs, two places a program.
        lse: [2 * num_programs, group] float32; base-2 logarithm of the sum of their weights.
        prefix: what was attended to already, of prefixes that sequences share; None if there are none.
    """

    tile: int
    early: bool
    tile_ends: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    prefix: PrefixPlan | None


@jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    context_lens_ptr, prefix_lens_ptr, tile_ends_ptr, num_seqs,
    TILE: tl.constexpr, SEQS: tl.constexpr, HAS_PREFIX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seqs = tl.arange(0, SEQS)
    mask = seqs < num_seqs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_keys = tl.load(context_lens_ptr + seqs, mask=mask, other=0)
    if HAS_PREFIX:
        num_keys -= tl.load(prefix_lens_ptr + seqs, mask=mask, other=0)
    tl.store(tile_ends_ptr + seqs, tl.cumsum(tl.cdiv(num_keys, TILE), axis=0), mask=mask)


def padded_seqs(num_seqs: int) -> int:
    """A size that is the same for all but the largest batches, so that they need no kernel of their own."""
    return max(512, triton.next_power_of_2(num_seqs))


def plan_decode(
    context_lens: torch.Tensor,
    num_programs: int,
    tile: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    shared: SharedPrefixes | None = None,
    early: bool = False,
) -> DecodePlan:
    """Plan the attention of one step for all its layers.

    Args:
        context_lens: [num_seqs] int32, at least 1 each.
        num_programs: programs to share the work.
        tile: tokens of a tile.
        num_heads, num_kv_heads: heads of queries, and of keys.
        head_dim: elements of a head.
        shared: prefixes to attend to once for all that share them; a sequence has at least one token besides.
        early: programs load their first tile before they wait, which is for those with few tiles; not with prefixes.
    """
    assert not (early and shared is not None)
    group = num_heads // num_kv_heads
    device = context_lens.device
    tile_ends = torch.empty_like(context_lens)
    _plan_kernel[(1,)](
        context_lens, None if shared is None else shared.rows, tile_ends, len(context_lens), TILE=tile,
        SEQS=padded_seqs(len(context_lens)), HAS_PREFIX=shared is not None, **pdl_options(device),
    )  # fmt: skip
    partial = torch.empty(2 * num_programs, group, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(2 * num_programs, group, dtype=torch.float32, device=device)
    prefix = None if shared is None else plan_prefixes(shared, num_heads, group, head_dim)
    return DecodePlan(tile, early, tile_ends, partial, lse, prefix)
