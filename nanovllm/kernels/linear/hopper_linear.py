"""Products of many rows for Hopper with fused epilogues: SiLU and gate of the MLP; QK norm, RoPE and store of QKV.

The product (`hopper_product`) stays in registers, where a separate product would write it for the next kernel to read.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    descriptor,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    tma_store,
    tma_store_wait,
)
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.linear.hopper_product import (
    COLUMNS,
    INS,
    ROWS,
    find_tile,
    halve,
    load_tiles,
    make_ring,
    multiply_tile,
)
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

HEAD_DIM = COLUMNS
"""The head size that `hopper_qkv_rope_store` supports."""
_ROW_MAJOR = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Layout for storing heads: 16 threads write a row of a head, 16 bytes each."""


@gluon.jit
def _gate(GROUP: gl.constexpr, out_desc, row_tiles, column_tiles, steps, ring, outs):
    """Run one warpgroup: multiply and gate half of each tile's rows."""
    dtype: gl.constexpr = out_desc.dtype
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = find_tile(tile, row_tiles, column_tiles)
        gate, up = halve(multiply_tile(GROUP, turn, steps, ring))
        turn += steps
        # Rounds like a separate product.
        gate, up = round_to(gate, dtype), round_to(up, dtype)
        gated = gate / (1 + gl.exp(-gate)) * up
        tma_store_wait(0)
        outs.index(GROUP).store(gated.to(dtype))
        fence_async_shared()
        tma_store(out_desc, [above * ROWS + GROUP * (ROWS // 2), left * COLUMNS], outs.index(GROUP))
    tma_store_wait(0)


@kernel(do_not_specialize=["row_tiles"])
def _gated_linear_kernel(x_desc, weight_desc, out_desc, row_tiles, column_tiles, steps):
    ring = make_ring(x_desc, weight_desc)
    outs = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS // 2, COLUMNS], out_desc.layout)
    gdc_wait()
    gdc_launch_dependents()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    size = column_tiles * COLUMNS
    gl.warp_specialize(
        [
            (_gate, (FIRST, out_desc, row_tiles, column_tiles, steps, ring, outs)),
            (_gate, (SECOND, out_desc, row_tiles, column_tiles, steps, ring, outs)),
            (load_tiles, (x_desc, weight_desc, row_tiles, column_tiles, steps, COLUMNS, size, ring)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def _store_head(head, ptr, places, known, stride):
    """Store a head, [ROWS / 2, HEAD_DIM], where `known`, at `ptr + places * stride`."""
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, _ROW_MAJOR))
    gl.store(
        ptr + places.to(gl.int64)[:, None] * stride + dims[None, :], gl.convert_layout(head, _ROW_MAJOR), known[:, None]
    )


@gluon.jit
def _finish_head(x, head, row, cos, sin, norms, outputs, num_rows, eps, HEADS: gl.constexpr, KV_HEADS: gl.constexpr):
    """Apply QK norm and RoPE to one head and store it; x: [ROWS / 2, HEAD_DIM]; cos, sin: [ROWS / 2, HEAD_DIM / 2]."""
    q_norm_ptr, k_norm_ptr = norms
    query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr = outputs
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    rows = row + gl.arange(0, ROWS // 2, gl.SliceLayout(1, _ROW_MAJOR))
    # Rounds like a separate product; before the branch, because the registers spill otherwise.
    x = round_to(x, dtype)
    if head < HEADS + KV_HEADS:
        first, second = halve(x)
        dims = gl.arange(0, HEAD_DIM // 2, gl.SliceLayout(0, first.type.layout))
        norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
        scale = rsqrt((gl.sum(first * first, 1) + gl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        first *= scale * gl.load(norm_ptr + dims).to(gl.float32)[None, :]
        second *= scale * gl.load(norm_ptr + HEAD_DIM // 2 + dims).to(gl.float32)[None, :]
        rotated = gl.join((first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype))
        rotated = rotated.permute((0, 2, 1)).reshape([ROWS // 2, HEAD_DIM])
        if head < HEADS:
            _store_head(rotated, query_ptr + head * HEAD_DIM, rows, rows < num_rows, HEADS * HEAD_DIM)
        else:
            slots = gl.load(slot_mapping_ptr + rows, mask=rows < num_rows, other=-1)
            _store_head(rotated, k_cache_ptr + (head - HEADS) * HEAD_DIM, slots, slots >= 0, KV_HEADS * HEAD_DIM)
    else:
        slots = gl.load(slot_mapping_ptr + rows, mask=rows < num_rows, other=-1)
        ptr = v_cache_ptr + (head - HEADS - KV_HEADS) * HEAD_DIM
        _store_head(x.to(dtype), ptr, slots, slots >= 0, KV_HEADS * HEAD_DIM)


@gluon.jit
def _finish_heads(
    GROUP: gl.constexpr, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Run one warpgroup: multiply half of each tile's rows, and finish the two heads that are the tile's columns."""
    num_rows, row_tiles, column_tiles, steps = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    left_part, _right_part = halve(gl.zeros([ROWS // 2, 2 * COLUMNS], gl.float32, ACC))
    half_head, _other_half = halve(left_part)
    LAYOUT: gl.constexpr = half_head.type.layout
    dims = gl.arange(0, HEAD_DIM // 2, gl.SliceLayout(0, LAYOUT))
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = find_tile(tile, row_tiles, column_tiles)
        row = above * ROWS + GROUP * (ROWS // 2)
        # Loaded before the product, which hides the latency.
        rows = row + gl.arange(0, ROWS // 2, gl.SliceLayout(1, LAYOUT))
        position = gl.load(positions_ptr + rows, mask=rows < num_rows, other=0)
        cos_ptrs = cos_sin_ptr + (position.to(gl.int64) * HEAD_DIM)[:, None] + dims[None, :]
        cos, sin = gl.load(cos_ptrs), gl.load(cos_ptrs + HEAD_DIM // 2)
        first, second = halve(multiply_tile(GROUP, turn, steps, ring))
        turn += steps
        _finish_head(first, 2 * left, row, cos, sin, norms, outputs, num_rows, eps, HEADS, KV_HEADS)
        _finish_head(second, 2 * left + 1, row, cos, sin, norms, outputs, num_rows, eps, HEADS, KV_HEADS)


@kernel(do_not_specialize=["num_rows", "row_tiles"])
def _qkv_kernel(
    x_desc, weight_desc, num_rows, row_tiles, column_tiles, steps, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, eps, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    ring = make_ring(x_desc, weight_desc)
    gdc_wait()
    gdc_launch_dependents()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    work = (num_rows, row_tiles, column_tiles, steps)
    norms = (q_norm_ptr, k_norm_ptr)
    outputs = (query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr)
    gl.warp_specialize(
        [
            (_finish_heads, (FIRST, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps, HEADS, KV_HEADS)),
            (_finish_heads, (SECOND, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps, HEADS, KV_HEADS)),
            (load_tiles, (x_desc, weight_desc, row_tiles, column_tiles, steps, 2 * COLUMNS, COLUMNS, ring)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def should_use(x: torch.Tensor, weight: torch.Tensor, num_programs: int) -> bool:
    """Return whether the kernels support these shapes, and tiles fill at least nine tenths of all waves of programs.

    Otherwise cuBLAS is faster: gate and up of Qwen3-0.6B with 1500 rows take 39.7 us here and 34.8 with cuBLAS.
    """
    known = x.element_size() == 2 and x.shape[1] % INS.value == 0 and len(weight) % (2 * COLUMNS.value) == 0
    tiles = -(-len(x) // ROWS.value) * (len(weight) // (2 * COLUMNS.value))
    return known and tiles >= 0.9 * num_programs * -(-tiles // num_programs)


def hopper_gated_linear(x: torch.Tensor, weight: torch.Tensor, num_programs: int) -> torch.Tensor:
    """Return SiLU(gate) * up of the product `x @ weight.T`.

    Args:
        x: [num_rows, in_features], of two-byte elements, contiguous.
        weight: [2 * size, in_features], contiguous; the gate's rows first.
        num_programs: maximum number of programs; the number of multiprocessors.

    Returns:
        [num_rows, size].
    """
    rows, in_features = x.shape
    out = torch.empty(rows, len(weight) // 2, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = -(-rows // ROWS.value), len(weight) // (2 * COLUMNS.value)
    _gated_linear_kernel[(min(num_programs, row_tiles * column_tiles),)](
        descriptor(x, [ROWS.value, INS.value]), descriptor(weight, [COLUMNS.value, INS.value]),
        descriptor(out, [ROWS.value // 2, COLUMNS.value]), row_tiles, column_tiles, in_features // INS.value,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def hopper_qkv_rope_store(
    x: torch.Tensor,
    weight: torch.Tensor,
    rope: NormRope,
    positions: torch.Tensor,
    pages: KVPages,
    slot_mapping: torch.Tensor,
    num_programs: int,
) -> torch.Tensor:
    """Compute `qkv_rope_store` of `x @ weight.T` for two-byte elements, an even number of heads of HEAD_DIM, and norms.

    Args:
        x: [num_tokens, hidden_size], contiguous.
        weight: [(num_heads + 2 * num_kv_heads) * HEAD_DIM, hidden_size].
        rope, positions, pages, slot_mapping: see `qkv_rope_store`.
        num_programs: the most programs: the number of multiprocessors.

    Returns:
        The queries, [num_tokens, num_heads, HEAD_DIM], contiguous.
    """
    assert rope.norm_weights is not None
    q_norm, k_norm = rope.norm_weights
    rows, in_features = x.shape
    kv_heads = pages.k_cache.shape[2]
    heads = len(weight) // HEAD_DIM.value - 2 * kv_heads
    query = torch.empty(rows, heads, HEAD_DIM.value, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = -(-rows // ROWS.value), len(weight) // (2 * COLUMNS.value)
    _qkv_kernel[(min(num_programs, row_tiles * column_tiles),)](
        descriptor(x, [ROWS.value, INS.value]), descriptor(weight, [COLUMNS.value, INS.value]),
        rows, row_tiles, column_tiles, in_features // INS.value, positions, rope.cos_sin, q_norm, k_norm,
        query, pages.k_cache, pages.v_cache, slot_mapping, rope.eps, HEADS=heads, KV_HEADS=kv_heads,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return query
