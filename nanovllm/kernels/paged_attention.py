"""Attention over pages, in Triton: one kernel for chunks of a prompt, one for single new tokens.

Both keep a running maximum and sum of the softmax (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et
al. 2022). Decoding cuts each context into pieces that run side by side, and merges them by their log-sum-exp
(Flash-Decoding, Dao et al. 2023). Products of float32 inputs are IEEE float32, never tf32.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import tl, triton

_LOG2E = 1.4426950408889634


@triton.jit
def _attend_tile(
    query, k_ptr, v_ptr, table_ptr, positions, key_mask, score_mask, scale,
    row_stride, acc, row_max, row_sum,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into a running softmax. k_ptr and v_ptr point at the KV head's first row."""
    dims = tl.arange(0, HEAD_DIM)
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
    rows = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * row_stride
    key = tl.load(k_ptr + rows[None, :] + dims[:, None], mask=key_mask[None, :], other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    scores = tl.where(score_mask, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
    safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    correction = tl.exp2(row_max - safe_max)
    value = tl.load(v_ptr + rows[:, None] + dims[None, :], mask=key_mask[:, None], other=0.0)
    acc = acc * correction[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, new_max, row_sum * correction + tl.sum(weights, axis=1)


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, block_tables_ptr, context_lens_ptr, cu_seqlens_q_ptr, scale,
    q_stride, out_stride, kv_row_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2)
    head = tl.program_id(1)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    # The last tiles have the longest contexts: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if tile * BLOCK_M < q_len:
        context_len = tl.load(context_lens_ptr + seq)
        q_index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q_position = context_len - q_len + q_index
        dims = tl.arange(0, HEAD_DIM)
        q_rows = (q_start + q_index).to(tl.int64)
        q_mask = (q_index < q_len)[:, None]
        query = tl.load(q_ptr + q_rows[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=q_mask, other=0.0)
        kv_offset = (head // GROUP) * HEAD_DIM
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        first_position = context_len - q_len + tile * BLOCK_M
        end = tl.minimum(context_len, first_position + BLOCK_M)
        for start in range(0, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            acc, row_max, row_sum = _attend_tile(
                query, k_ptr + kv_offset, v_ptr + kv_offset, table_ptr, positions, positions < end,
                positions[None, :] <= q_position[:, None], scale, kv_row_stride, acc, row_max, row_sum,
                BLOCK_SIZE, HEAD_DIM,
            )  # fmt: skip
        out = acc / row_sum[:, None]
        tl.store(
            out_ptr + q_rows[:, None] * out_stride + head * HEAD_DIM + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=q_mask,
        )


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, block_tables_ptr, context_lens_ptr, scale,
    q_stride, kv_row_stride, table_stride, num_heads,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(context_lens_ptr + seq)
    split_len = tl.cdiv(tl.cdiv(context_len, num_splits), BLOCK_N) * BLOCK_N
    first = split * split_len
    end = tl.minimum(context_len, first + split_len)
    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + group
    group_mask = group < GROUP
    query = tl.load(
        q_ptr + seq * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=group_mask[:, None], other=0.0
    )
    kv_offset = kv_head * HEAD_DIM
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([GROUP_PADDED], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        in_split = positions < end
        acc, row_max, row_sum = _attend_tile(
            query, k_ptr + kv_offset, v_ptr + kv_offset, block_tables_ptr + seq * table_stride, positions, in_split,
            in_split[None, :], scale, kv_row_stride, acc, row_max, row_sum,
            BLOCK_SIZE, HEAD_DIM,
        )  # fmt: skip
    # A split past the end of its context has maximum -inf: it leaves zeros, weighted by exp2(-inf).
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / row_sum[:, None]
    partial = (seq * num_heads + heads) * num_splits + split
    tl.store(partial_ptr + partial[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask[:, None])
    tl.store(lse_ptr + partial, row_max + tl.log2(row_sum), mask=group_mask)


@triton.jit
def _merge_kernel(partial_ptr, lse_ptr, out_ptr, NUM_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + splits)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    partial = tl.load(partial_ptr + (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :])
    out = tl.sum(partial * weights[:, None], axis=0)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> None:
    """Causal attention of the last tokens of each sequence over all its pages, into `out`.

    Args:
        query, out: [num_tokens, num_heads, head_dim], rows contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        block_tables: [num_seqs, max_blocks] int32.
        context_lens: [num_seqs] int32, the sequence's query tokens included.
        cu_seqlens_q: [num_seqs + 1] int32.
        max_query_len: most query tokens of one sequence.
        scale: factor of the scores.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    wide = query.element_size() == 4
    block_m = 32 if wide else 64 if max_query_len <= 64 else 128
    block_n = 32 if wide else 64
    grid = (triton.cdiv(max_query_len, block_m), num_heads, len(context_lens))
    _prefill_kernel[grid](
        query, k_cache, v_cache, out, block_tables, context_lens, cu_seqlens_q, scale * _LOG2E,
        query.stride(0), out.stride(0), num_kv_heads * head_dim, block_tables.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=8 if block_m == 128 else 4, num_stages=1 if wide else 2,
    )  # fmt: skip


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_splits: int,
    scale: float,
) -> None:
    """Attention of one new token of each sequence over all its pages, into `out`.

    Args:
        query, out: [num_seqs, num_heads, head_dim]; query's rows and all of out contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        block_tables: [num_seqs, max_blocks] int32.
        context_lens: [num_seqs] int32, at least 1, the new token included.
        num_splits: pieces that each context is cut into, a power of two.
        scale: factor of the scores.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    partial = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=query.device)
    group = num_heads // num_kv_heads
    wide = query.element_size() == 4
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query, k_cache, v_cache, partial, lse, block_tables, context_lens, scale * _LOG2E,
        query.stride(0), num_kv_heads * head_dim, block_tables.stride(0), num_heads,
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_N=32 if wide else 128, num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_kernel[(num_seqs * num_heads,)](partial, lse, out, NUM_SPLITS=num_splits, HEAD_DIM=head_dim, num_warps=1)
