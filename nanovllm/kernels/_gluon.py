"""Gluon, the language beneath Triton's: what a kernel says itself of layouts, barriers, and which warps do what.

For kernels with Hopper's instructions, whose files are imported where there is such a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, recorded

_Kernel = recorded(GluonJITFunction)

# Names of Triton 3.9; 3.6 and 3.7 have the others.
_NEW = hasattr(tma, "async_load")
tma_load = tma.async_load if _NEW else tma.async_copy_global_to_shared
"""(descriptor, place, barrier, shared memory): start to copy a block in, which then completes the barrier's phase."""
tma_store = tma.async_store if _NEW else tma.async_copy_shared_to_global
"""(descriptor, place, shared memory): start to copy a block out."""
tma_store_wait = tma.store_wait
"""(number): wait until no more than so many copies out still read shared memory."""

async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""(shared memory, pointers, mask): start to copy elements in, zeros where the mask is false."""

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""(): all warps of the program meet."""


def kernel(*, do_not_specialize: Sequence[str], unaligned: Sequence[str] = ()) -> Any:
    """Make a kernel that `compile_ahead` can compile; see `_triton.jit`."""
    return lambda function: _Kernel(
        function, do_not_specialize=list(do_not_specialize), do_not_specialize_on_alignment=list(unaligned)
    )


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Barriers of each of some places in shared memory: it is full, and all groups of warps that read it are done."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


def descriptor(tensor: torch.Tensor, block_shape: list[int]) -> Any:
    """Describe a tensor of two-byte elements to the tensor memory accelerator, which copies blocks of it.

    They lie in shared memory as products want them.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block_shape))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block_shape, layout)


__all__ = [
    "async_copy",
    "async_load",
    "barrier",
    "descriptor",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "kernel",
    "make_barriers",
    "mbarrier",
    "mma_v2",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
