"""Write the new keys and values of a step to their places in the paged cache."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import tl, triton


def store_kv_ref(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor
) -> None:
    """Plain torch form of `store_kv`."""
    stored = kv_slots >= 0
    slots = kv_slots[stored]
    k_cache.flatten(0, 1)[slots] = key[stored].to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = value[stored].to(v_cache.dtype)


@triton.jit
def _store_kv_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, kv_slots_ptr, k_stride, v_stride, row_size, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offsets = tl.arange(0, BLOCK)
        mask = offsets < row_size
        key = tl.load(key_ptr + token * k_stride + offsets, mask=mask)
        value = tl.load(value_ptr + token * v_stride + offsets, mask=mask)
        tl.store(k_cache_ptr + slot * row_size + offsets, key, mask=mask)
        tl.store(v_cache_ptr + slot * row_size + offsets, value, mask=mask)


def store_kv_triton(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor
) -> None:
    """Triton form of `store_kv`, one program a token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        kv_slots,
        key.stride(0),
        value.stride(0),
        row_size,
        BLOCK=triton.next_power_of_2(row_size),
    )


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor
) -> None:
    """Store keys and values in the cache, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], rows contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        kv_slots: [num_tokens] int32, `block * block_size + offset`; -1 stores nothing.
    """
    (store_kv_triton if key.is_cuda else store_kv_ref)(key, value, k_cache, v_cache, kv_slots)
