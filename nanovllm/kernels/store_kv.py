"""Keys and values that are ready, into the pages of a cache."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.qkv_rope_store import KVPages, quantize_kv, store_rows


def store_kv_ref(key: torch.Tensor, value: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Plain torch form of `store_kv`."""
    store_rows(key, value, pages, slot_mapping)


@jit
def _store(x_ptr, cache_ptr, token, slot, token_stride, head_stride,
           HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
           scale_ptr, clipped_ptr, NATIVE: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HEADS * SIZE
    source = token * token_stride + (offsets // SIZE) * head_stride + offsets % SIZE
    x = tl.load(x_ptr + source, mask=mask, other=0.0)
    if scale_ptr is not None:
        scales = tl.load(scale_ptr + offsets // SIZE, mask=mask, other=1.0)
        x = quantize_kv(x, scales, mask, clipped_ptr, NATIVE)
    tl.store(cache_ptr + slot * (HEADS * SIZE) + offsets, x.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _store_kv_kernel(
    key_ptr, value_ptr, slot_mapping_ptr, k_cache_ptr, v_cache_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, clipped_ptr=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    wait_for_previous(PDL)
    if slot >= 0:
        _store(key_ptr, k_cache_ptr, token, slot, key_token_stride, key_head_stride, HEADS, KEY_SIZE, KEY_BLOCK,
               k_scale_ptr, clipped_ptr, NATIVE)  # fmt: skip
        _store(value_ptr, v_cache_ptr, token, slot, value_token_stride, value_head_stride, HEADS, VALUE_SIZE,
               VALUE_BLOCK, v_scale_ptr, clipped_ptr, NATIVE)  # fmt: skip


def store_kv(key: torch.Tensor, value: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Store the keys and values of a step's tokens in the cache in place, in its dtype.

    `slot_mapping` must be written before the kernel queued last (see `pdl_options`).

    Args:
        key: [num_tokens, num_kv_heads, key_size]; elements of a head contiguous.
        value: [num_tokens, num_kv_heads, value_size]; likewise.
        pages: where they go.
        slot_mapping: [num_tokens] int32; KV slots, `block * block_size + offset`; -1 stores nothing.
    """
    if not uses_triton(key.device):
        return store_kv_ref(key, value, pages, slot_mapping)
    num_tokens, num_heads, key_size = key.shape
    value_size = value.shape[2]
    assert key.stride(2) == value.stride(2) == 1 and slot_mapping.is_contiguous()
    assert pages.k_cache.is_contiguous() and pages.v_cache.is_contiguous()
    k_cache, v_cache = pages.stored
    key_block, value_block = (triton.next_power_of_2(num_heads * size) for size in (key_size, value_size))
    _store_kv_kernel[(num_tokens,)](
        key, value, slot_mapping, k_cache, v_cache,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=num_heads, KEY_SIZE=key_size, VALUE_SIZE=value_size, KEY_BLOCK=key_block, VALUE_BLOCK=value_block,
        num_warps=min(8, max(1, key_block // 512)), **pdl_options(key.device), **pages.store_scaling,
    )  # fmt: skip
    return None
