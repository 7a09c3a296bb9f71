"""QK norm, RoPE, and the store of keys and values into the paged cache, in one op.

The per-head RMS norm is Qwen3's; RoPE: Su et al. 2021, arXiv:2104.09864. Separate ops would each cost a launch and a
pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import (
    jit,
    pdl_options,
    tl,
    triton,
    uses_triton,
    wait_for_previous,
)
from nanovllm.kernels.fast_math import rsqrt

NormWeights = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class NormRope:
    """What is done to the heads of queries and keys of one layer: an RMS norm, if there is one, then RoPE.

    Attributes:
        norm_weights: of the query norm and of the key norm, [head_dim] each; None for no norm.
        eps: added to the mean square.
        cos_sin: [max_position, head_dim] float32; head_dim / 2 cosines, then as many sines.
    """

    norm_weights: NormWeights | None
    eps: float
    cos_sin: torch.Tensor


@dataclass(slots=True)
class KVPages:
    """The KV cache of one layer.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor


def qkv_rope_store_ref(
    qkv: torch.Tensor,
    rope: NormRope,
    positions: torch.Tensor,
    pages: KVPages,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Plain torch form of `qkv_rope_store`."""
    num_kv_heads = pages.k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    x = qkv[:, : num_heads + num_kv_heads].float()
    if rope.norm_weights is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rope.eps)
        q_weight, k_weight = rope.norm_weights
        x = x * torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))).float()
    cos, sin = rope.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    x = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    pages.k_cache.flatten(0, 1)[slots] = x[stored, num_heads:]
    pages.v_cache.flatten(0, 1)[slots] = qkv[stored, num_heads + num_kv_heads :]
    return x[:, :num_heads].contiguous()


@jit
def _qkv_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slot_mapping_ptr, query_ptr,
    k_cache_ptr, v_cache_ptr, eps, row_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + dims)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + dims)[None, :]
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if HAS_NORM:
        q_first, q_second = tl.load(q_weight_ptr + dims), tl.load(q_weight_ptr + HALF + dims)
        k_first, k_second = tl.load(k_weight_ptr + dims), tl.load(k_weight_ptr + HALF + dims)
    wait_for_previous(PDL)
    mask = (heads < NUM_HEADS + 2 * KV_HEADS)[:, None]
    offsets = heads[:, None] * (2 * HALF) + dims[None, :]
    raw_first = tl.load(qkv_ptr + token * row_stride + offsets, mask=mask, other=0.0)
    raw_second = tl.load(qkv_ptr + token * row_stride + HALF + offsets, mask=mask, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    is_query = (heads < NUM_HEADS)[:, None]
    if HAS_NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * tl.where(is_query, q_first[None, :], k_first[None, :]).to(tl.float32)
        second *= scale * tl.where(is_query, q_second[None, :], k_second[None, :]).to(tl.float32)
    dtype = query_ptr.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)

    query = query_ptr + token * (NUM_HEADS * 2 * HALF) + offsets
    tl.store(query, rotated_first, mask=is_query)
    tl.store(query + HALF, rotated_second, mask=is_query)
    if slot >= 0:
        is_value = (heads >= NUM_HEADS + KV_HEADS)[:, None]
        is_key = mask & (is_query == 0) & (is_value == 0)
        row = slot * (KV_HEADS * 2 * HALF) + offsets
        key = k_cache_ptr + row - NUM_HEADS * 2 * HALF
        tl.store(key, rotated_first, mask=is_key)
        tl.store(key + HALF, rotated_second, mask=is_key)
        value = v_cache_ptr + row - (NUM_HEADS + KV_HEADS) * 2 * HALF
        tl.store(value, raw_first, mask=mask & is_value)
        tl.store(value + HALF, raw_second, mask=mask & is_value)


def qkv_rope_store(
    qkv: torch.Tensor,
    rope: NormRope,
    positions: torch.Tensor,
    pages: KVPages,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Apply QK norm (if there are weights) and RoPE, and store keys and values in the cache in place.

    All inputs but qkv must be written before the kernel queued last (see `pdl_options`).

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key and value heads; rows contiguous.
        rope: the layer's norms and table.
        positions: [num_tokens] int32.
        pages: where keys and values are stored.
        slot_mapping: [num_tokens] int32; KV slots, `block * block_size + offset`; -1 stores nothing.

    Returns:
        The queries, [num_tokens, num_heads, head_dim], contiguous; computed in float32, in qkv's dtype.
    """
    if not uses_triton(qkv.device):
        return qkv_rope_store_ref(qkv, rope, positions, pages, slot_mapping)
    num_tokens, all_heads, head_dim = qkv.shape
    cos_sin, k_cache, v_cache = rope.cos_sin, pages.k_cache, pages.v_cache
    num_kv_heads = k_cache.shape[2]
    num_heads = all_heads - 2 * num_kv_heads
    assert qkv.stride()[1:] == (head_dim, 1) and cos_sin.is_contiguous() and positions.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = rope.norm_weights if rope.norm_weights is not None else (cos_sin, cos_sin)
    heads = 8
    _qkv_rope_store_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
        qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, query, k_cache, v_cache, rope.eps,
        qkv.stride(0), NUM_HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2, HEADS=heads,
        HAS_NORM=rope.norm_weights is not None, num_warps=2, **pdl_options(qkv.device),
    )  # fmt: skip
    return query
