"""Attention of many sequences' new tokens over the pages that they share, in Triton.

Sequences with one prefix would each read its keys and values at every step. Here the queries of many of them are the
rows of one matrix, and the pages are read once for all of it (Hydragen, Juravsky et al. 2024, arXiv:2402.05099); what
comes out is merged, by its log-sum-exp, with attention to the pages that each has for itself (`decode_attention`,
`hopper_decode`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.kernels.attention.online_softmax import LOG2E, attend_tile
from nanovllm.kernels.fast_math import log2

_FLOAT32_WARPS = 16
"""Float32 has no matrix instructions: with 4 warps, a thread spills up to 1700 bytes, and with 8 up to 490."""
_QUERY_ROWS = 64
"""Query heads of one item, those that pad a group to a power of two included."""


@dataclass
class CascadeGroups:
    """Which decode rows share a prefix, as a list of work; numbers on the device, so that a graph may read them.

    Attributes:
        items: [num_items, 4] int32; for each item where its rows start among `members`, how many there are (0:
            no work), the first key and the number of keys.
        members: [num_rows] int32; decode rows, in the order of the items.
        rows: [3, num_rows] int32; for each decode row the tokens that it shares, and the places of their outputs: the
            first, `item * rows_per_item + number within the item`, and how many, `rows_per_item` apart.
    """

    items: torch.Tensor
    members: torch.Tensor
    rows: torch.Tensor


@dataclass
class CascadePlan:
    """What all layers of a step share.

    Attributes:
        shared: the work.
        rows_per_item: see `rows_per_item`.
        partial: [num_items * rows_per_item, num_heads, head_dim] float32; outputs.
        lse: [num_items * rows_per_item, num_heads] float32; base-2 logarithm of the sum of their weights.
    """

    shared: CascadeGroups
    rows_per_item: int
    partial: torch.Tensor
    lse: torch.Tensor


def rows_per_item(group: int) -> int:
    """Most decode rows of one item, with `group` query heads of a KV head each."""
    padded = 1 << (group - 1).bit_length()
    return max(1, _QUERY_ROWS // padded)


def plan_cascade(shared: CascadeGroups, num_heads: int, group: int, head_dim: int) -> CascadePlan:
    """Make room for the outputs of the items; `group` query heads of a KV head."""
    places = len(shared.items) * rows_per_item(group)
    device = shared.items.device
    partial = torch.empty(places, num_heads, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(places, num_heads, dtype=torch.float32, device=device)
    return CascadePlan(shared, rows_per_item(group), partial, lse)


@jit(do_not_specialize=["table_size"])
def _cascade_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, items_ptr, members_ptr, block_tables_ptr, scale,
    q_stride, table_stride, table_size,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_POW2: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head, item = tl.program_id(0), tl.program_id(1)
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
        # The pages are the same for all, so any member's table will do.
        table_ptr = block_tables_ptr + tl.load(members_ptr + first_member).to(tl.int64) * table_stride
        acc = tl.zeros([ROWS * GROUP_POW2, HEAD_DIM], dtype=tl.float32)
        row_max = tl.full([ROWS * GROUP_POW2], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS * GROUP_POW2], dtype=tl.float32)
        whole_end = first_key + (end - first_key) // TILE * TILE
        for start in range(first_key, whole_end, TILE):
            acc, row_max, row_sum = attend_tile(
                query, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, start, None, None,
                scale, KV_HEADS * HEAD_DIM, acc, row_max, row_sum, BLOCK_SIZE, HEAD_DIM, TILE,
            )  # fmt: skip
        for start in range(whole_end, end, TILE):
            seen = start + tl.arange(0, TILE) < end
            acc, row_max, row_sum = attend_tile(
                query, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, start, seen,
                seen[None, :], scale, KV_HEADS * HEAD_DIM, acc, row_max, row_sum, BLOCK_SIZE, HEAD_DIM, TILE,
            )  # fmt: skip
        places = ((item * ROWS + row) * KV_HEADS + head) * GROUP + group
        tl.store(partial_ptr + places.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], acc / row_sum[:, None],
                 mask=mask[:, None])  # fmt: skip
        tl.store(lse_ptr + places, row_max + log2(row_sum), mask=mask)


def cascade_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: CascadePlan,
    scale: float,
) -> None:
    """Attention of decode rows over the prefixes that they share, into the plan's outputs.

    Args:
        query: [num_seqs, num_heads, head_dim]; rows contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        block_tables: [num_seqs, max_blocks] int32.
        plan: of this step.
        scale: factor of the scores.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    shared = plan.shared
    wide = query.element_size() == 4
    _cascade_kernel[(num_kv_heads, len(shared.items))](
        query, k_cache, v_cache, plan.partial, plan.lse, shared.items, shared.members, block_tables, scale * LOG2E,
        query.stride(0), block_tables.stride(0), block_tables.shape[1],
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_POW2=triton.next_power_of_2(group), ROWS=plan.rows_per_item,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=16 if wide else 64,
        num_warps=_FLOAT32_WARPS if wide else 4, num_stages=1 if wide else 3, **pdl_options(query.device),
    )  # fmt: skip
