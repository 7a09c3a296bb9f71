"""Attention of chunks of prompts over pages, in Triton: FlashAttention (Dao et al. 2022) with a block table."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, pdl_options, tl, triton
from nanovllm.kernels.online_softmax import LOG2E, attend_tile


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, block_tables_ptr, context_lens_ptr, cu_seqlens_q_ptr, scale,
    q_stride, out_stride, kv_row_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
            acc, row_max, row_sum = attend_tile(
                query, k_ptr + kv_offset, v_ptr + kv_offset, table_ptr, start, positions < end,
                positions[None, :] <= q_position[:, None], scale, kv_row_stride, acc, row_max, row_sum,
                BLOCK_SIZE, HEAD_DIM, BLOCK_N,
            )  # fmt: skip
        out = acc / row_sum[:, None]
        tl.store(
            out_ptr + q_rows[:, None] * out_stride + head * HEAD_DIM + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=q_mask,
        )


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
        query, k_cache, v_cache, out, block_tables, context_lens, cu_seqlens_q, scale * LOG2E,
        query.stride(0), out.stride(0), num_kv_heads * head_dim, block_tables.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=8 if block_m == 128 else 4, num_stages=1 if wide else 2,
        **pdl_options(query.device),
    )  # fmt: skip
