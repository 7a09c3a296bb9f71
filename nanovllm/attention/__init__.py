"""Attention backends over the paged KV cache, one file each, and `make_backend`, which chooses one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.kernels._triton import triton_obstacle
from nanovllm.utils.extras import install_hint


def make_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_slots: int,
    shares_prefixes: bool = False,
    all_reduce_min: Callable[[int], int] = int,
) -> AttentionBackend:
    """Return the backend called `name`; "auto" is triton on CUDA and sdpa elsewhere.

    Args:
        name: "auto", "sdpa", "triton" or "flash_attn".
        device, dtype: of the queries and the KV cache.
        block_size: tokens per cache block.
        num_heads, num_kv_heads: query heads and KV heads.
        head_dim: elements per head.
        num_slots: most decode rows.
        shares_prefixes: whether sequences share blocks of the prefix cache.
        all_reduce_min: returns the least of all ranks' numbers, which call this together.

    Raises:
        ValueError: the backend does not support this device, dtype or block size, or it (or Triton, which all but
            "sdpa" need) is not installed.
    """
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaBackend(block_size)
    obstacle = triton_obstacle(device)
    if obstacle is not None:
        # flash_attn replaces only the attention kernels; the other ops still need Triton.
        raise ValueError(
            f"attention_backend={name!r} takes Triton kernels on {device.type!r}, but {obstacle}: take 'sdpa', which "
            "is plain torch and slower, or device='cpu'"
        )
    if name in ("auto", "triton"):
        from nanovllm.attention.triton import TritonBackend  # noqa: PLC0415

        return TritonBackend(
            device,
            dtype,
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            num_slots=num_slots,
            shares_prefixes=shares_prefixes,
            all_reduce_min=all_reduce_min,
        )
    if dtype == torch.float32:
        raise ValueError("attention_backend='flash_attn' takes bfloat16 or float16, not float32")
    if block_size % 256:
        raise ValueError(f"attention_backend='flash_attn' needs a kvcache_block_size multiple of 256, not {block_size}")
    if find_spec("flash_attn") is None:
        raise ValueError(f"attention_backend='flash_attn' is not installed: {install_hint('flash-attn')}")
    from nanovllm.attention.flash_attn import FlashAttnBackend  # noqa: PLC0415

    return FlashAttnBackend()


__all__ = ["AttentionBackend", "make_backend"]
