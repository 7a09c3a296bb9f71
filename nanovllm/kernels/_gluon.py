"""Gluon, Triton's lower-level language, in which a kernel controls layouts, barriers and warp specialisation itself.

Hopper's kernels import this module; their files are imported only on such a GPU.
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

# Triton 3.9 renamed these functions; 3.6 and 3.7 have the old names.
_NEW = hasattr(tma, "async_load")
tma_load = tma.async_load if _NEW else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): start copying a block in; completion arrives on the barrier."""
tma_store = tma.async_store if _NEW else tma.async_copy_shared_to_global
"""(descriptor, coordinates, shared memory): start copying a block out."""
tma_store_wait = tma.store_wait
"""(number): wait until at most `number` copies out still read shared memory."""

async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""(shared memory, pointers, mask): start copying elements in; zeros where the mask is false."""

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""(): barrier over all warps of the program."""


_Shared = gl.shared_memory_descriptor
reinterpret = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret
"""(shared memory, dtype, shape, layout): the same memory as another array."""


def kernel(*, do_not_specialize: Sequence[str], unaligned: Sequence[str] = ()) -> Any:
    """Return a decorator that makes a Gluon kernel that `compile_ahead` can compile; see `_triton.jit`."""
    return lambda function: _Kernel(
        function, do_not_specialize=list(do_not_specialize), do_not_specialize_on_alignment=list(unaligned)
    )


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Allocate two barriers per stage: `full`, one arrival, and `empty`, one arrival by each of READERS warp groups."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit
def halve(x):
    """Split [n, 2 * m] into its left and right columns, [n, m] each, without moving data between threads."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


def descriptor(tensor: torch.Tensor, block_shape: list[int]) -> Any:
    """Return the TMA descriptor of a tensor of one- or two-byte elements, copied in blocks of `block_shape`.

    In shared memory a block has the swizzle that `warpgroup_mma` and bank-conflict-free loads need: of 128 bytes, or of
    all the bytes of a row, if these are fewer.
    """
    swizzle, bits = min(128, block_shape[-1] * tensor.element_size()), 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block_shape))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block_shape, layout)


__all__ = [
    "async_copy", "async_load", "barrier", "descriptor", "fence_async_shared", "gdc_launch_dependents", "gdc_wait",
    "gl", "gluon", "halve", "kernel", "make_barriers", "mbarrier", "mma_v2", "reinterpret", "tma_load",
    "tma_store", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
