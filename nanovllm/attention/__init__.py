"""Attention backends over the paged KV cache, one file each, and `make_backend`, which chooses one."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch

from nanovllm.attention.backend import AttentionBackend, AttentionSetup
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.kernels._triton import triton_obstacle
from nanovllm.kernels.attention.options import MAX_HEAD_SIZE
from nanovllm.utils.display import install_hint


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """Return the backend called `name`; "auto" is triton on CUDA, if it supports the layers, and sdpa elsewhere.

    `check_backend` must have found no fault.
    """
    if name == "sdpa" or (name == "auto" and setup.device.type != "cuda"):
        return SdpaBackend(setup.block_size)
    largest = max(max(spec.key_size, spec.value_size) for spec in setup.specs)
    if name == "auto" and largest > MAX_HEAD_SIZE:
        warnings.warn(
            "attention is attention_backend='sdpa', without CUDA graphs and slower: kernels take heads of at most "
            f"{MAX_HEAD_SIZE} elements, and a layer has {largest}",
            stacklevel=2,
        )
        return SdpaBackend(setup.block_size)
    if name in ("auto", "triton"):
        from nanovllm.attention.triton import TritonBackend  # noqa: PLC0415

        return TritonBackend(setup)
    from nanovllm.attention.flash_attn import FlashAttnBackend  # noqa: PLC0415

    return FlashAttnBackend()


def check_backend(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    """Check what needs no model.

    Raises:
        ValueError: the backend does not support this device, dtype or block size, or it (or Triton, which all but
            "sdpa" need) is not installed.
    """
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return
    obstacle = triton_obstacle(device)
    if obstacle is not None:
        # flash_attn replaces only the attention kernels; the other ops still need Triton.
        raise ValueError(
            f"attention_backend={name!r} takes Triton kernels on {device.type!r}, but {obstacle}: take 'sdpa', which "
            "is plain torch and slower, or device='cpu'"
        )
    if name != "flash_attn":
        return
    if dtype == torch.float32:
        raise ValueError("attention_backend='flash_attn' takes bfloat16 or float16, not float32")
    if block_size % 256:
        raise ValueError(f"attention_backend='flash_attn' needs a kvcache_block_size multiple of 256, not {block_size}")
    if find_spec("flash_attn") is None:
        raise ValueError(f"attention_backend='flash_attn' is not installed: {install_hint('flash-attn')}")


__all__ = ["AttentionBackend", "AttentionSetup", "check_backend", "make_backend"]
