"""Cascade attention in Triton: attention of many sequences' new tokens over a shared prefix.

Queries are the rows of one matrix, so that the prefix is read once for all (Hydragen, Juravsky et al. 2024,
arXiv:2402.05099). `decode_attention` and `hopper_decode` merge the outputs with attention over each sequence's own
pages, and multiply them by the scales of pages in e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.attention.online_softmax import attend_tile, beside_keys, by_head
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions, padded_size
from nanovllm.kernels.fast_math import log2
from nanovllm.kernels.qkv_rope_store import KVPages

_FLOAT32_WARPS = 16
"""Float32 has no matrix instructions, and threads of fewer warps spill registers: up to 490 bytes with 8 warps."""
_QUERY_ROWS = 64
"""Query rows per item: decode rows times the heads of a group, padded to a power of two."""


@dataclass
class CascadeGroups:
    """Work items on the device: each is some decode rows' attention over some keys of the prefix that they share.

    Attributes:
        items: [num_items, 4] int32; first index into `members`, number of decode rows (0: no work), first key, number
            of keys.
        members: [num_rows] int32; decode rows in the order of the items.
        rows: [3, num_rows] int32; for each decode row its shared tokens, its first output row in `CascadePlan.partial`
            (`item * rows_per_item + index within the item`), and its number of outputs, `rows_per_item` rows apart.
    """

    items: torch.Tensor
    members: torch.Tensor
    rows: torch.Tensor


@dataclass
class CascadePlan:
    """Work items and output buffers, shared by all layers of a step.

    Attributes:
        shared, rows_per_item: the work items, and the maximum number of decode rows of one.
        partial: [num_items * rows_per_item, num_heads, head_dim] float32; outputs.
        lse: [num_items * rows_per_item, num_heads] float32; their base-2 log-sum-exp.
    """

    shared: CascadeGroups
    rows_per_item: int
    partial: torch.Tensor
    lse: torch.Tensor


def supports(head_dim: int) -> bool:
    """Return whether the kernel supports keys and values of this size."""
    return head_dim == padded_size(head_dim) <= 128


def rows_per_item(group: int) -> int:
    """Return the maximum number of decode rows per item, with `group` query heads per KV head."""
    padded = 1 << (group - 1).bit_length()
    return max(1, _QUERY_ROWS // padded)


def plan_cascade(shared: CascadeGroups, num_heads: int, group: int, head_dim: int) -> CascadePlan:
    """Allocate the outputs of the items; `group` is the number of query heads per KV head."""
    places = len(shared.items) * rows_per_item(group)
    device = shared.items.device
    partial = torch.empty(places, num_heads, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(places, num_heads, dtype=torch.float32, device=device)
    return CascadePlan(shared, rows_per_item(group), partial, lse)


@jit(do_not_specialize=["table_size"])
def _cascade_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, items_ptr, members_ptr, block_tables_ptr, cap_scale, scale,
    q_stride, table_stride, table_size,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_POW2: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    wait_for_previous(PDL)
    head, item = tl.program_id(0), tl.program_id(1)
    scale = by_head(scale, k_scale_ptr, head) if cap_scale is None else scale
    cap_scale = None if cap_scale is None else by_head(cap_scale, k_scale_ptr, head)
    count = tl.load(items_ptr + item * 4 + 1)
    if count > 0:
        first_member = tl.load(items_ptr + item * 4)
        first_key = tl.load(items_ptr + item * 4 + 2)
        end = first_key + tl.load(items_ptr + item * 4 + 3)
        index = tl.arange(0, ROWS * GROUP_POW2)
        row, group = index // GROUP_POW2, index % GROUP_POW2
        mask = (row < count) & (group < GROUP)
        seqs = tl.load(members_ptr + first_member + row, mask=mask, other=0).to(tl.int64)
        dims = tl.arange(0, HEAD_DIM)
        q_rows = seqs * q_stride + (head * GROUP + group) * HEAD_DIM
        query = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
        query = beside_keys(query, k_ptr)
        # All members share these pages, so the first one's block table serves for all.
        table_ptr = block_tables_ptr + tl.load(members_ptr + first_member).to(tl.int64) * table_stride
        acc = tl.zeros([ROWS * GROUP_POW2, HEAD_DIM], dtype=tl.float32)
        row_max = tl.full([ROWS * GROUP_POW2], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS * GROUP_POW2], dtype=tl.float32)
        whole_end = first_key + (end - first_key) // TILE * TILE
        for start in range(first_key, whole_end, TILE):
            pages = (k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, STRIDE, STRIDE)
            acc, row_max, row_sum = attend_tile(
                query, pages, start, None, None, scale, cap_scale, (acc, row_max, row_sum),
                BLOCK_SIZE, HEAD_DIM, HEAD_DIM, TILE, NATIVE,
            )  # fmt: skip
        for start in range(whole_end, end, TILE):
            seen = start + tl.arange(0, TILE) < end
            pages = (k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, STRIDE, STRIDE)
            acc, row_max, row_sum = attend_tile(
                query, pages, start, seen, seen[None, :], scale, cap_scale, (acc, row_max, row_sum),
                BLOCK_SIZE, HEAD_DIM, HEAD_DIM, TILE, NATIVE,
            )  # fmt: skip
        places = ((item * ROWS + row) * KV_HEADS + head) * GROUP + group
        tl.store(partial_ptr + places.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], acc / row_sum[:, None],
                 mask=mask[:, None])  # fmt: skip
        tl.store(lse_ptr + places, row_max + log2(row_sum), mask=mask)


def cascade_attention(
    query: torch.Tensor, pages: KVPages, block_tables: torch.Tensor, plan: CascadePlan, scale: float,
    options: AttentionOptions = PLAIN,
) -> None:  # fmt: skip
    """Compute attention of decode rows over their shared prefixes, into the plan's outputs.

    Arguments: see `decode_attention`, with keys and values of equal size and options without a window. Sinks
    and the scales of values in e4m3 are left to the kernel that merges the outputs.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = pages.k_cache.shape
    group = num_heads // num_kv_heads
    shared = plan.shared
    cap_scale, scale = options.score_scales(scale)
    (k_cache, v_cache), scaling = pages.stored, pages.scaling
    scaling.pop("v_scale_ptr", None)
    wide = query.element_size() == 4
    _cascade_kernel[(num_kv_heads, len(shared.items))](
        query, k_cache, v_cache, plan.partial, plan.lse, shared.items, shared.members, block_tables,
        cap_scale, scale,
        query.stride(0), block_tables.stride(0), block_tables.shape[1],
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_POW2=triton.next_power_of_2(group), ROWS=plan.rows_per_item,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=16 if wide else 64,
        num_warps=_FLOAT32_WARPS if wide else 4, num_stages=1 if wide else 3, **pdl_options(query.device), **scaling,
    )  # fmt: skip
