"""Products of many rows on Hopper, `x @ weight.T`, with fused epilogues: SiLU and gate of the MLP; QK norm, RoPE and
store of QKV. The product stays in registers, where a separate one would write it for the next kernel to read.

One program per multiprocessor loops over output tiles. One warp copies tiles into the stages by TMA; two warpgroups
each multiply half of a tile's rows, unsynchronised, so that one's epilogue overlaps with the other's product. Results
equal cuBLAS's to the bit.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    halve,
    kernel,
    make_barriers,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels._triton import wait_for_previous
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.policy import PERSISTENT_COLUMNS, PERSISTENT_INS, PERSISTENT_ROWS
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

_ROWS = gl.constexpr(PERSISTENT_ROWS)
_COLUMNS = gl.constexpr(PERSISTENT_COLUMNS)
_INS = gl.constexpr(PERSISTENT_INS)
_HEAD_DIM = _COLUMNS
_STAGES = gl.constexpr(4)
"""Pipeline stages; one step each."""
_BAND = gl.constexpr(16)
"""Tiles are ordered by bands of this many rows of tiles, column by column, so that both operands stay in L2."""
_ROW_MAJOR = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Layout for storing heads: 16 threads write a row of a head, 16 bytes each."""


@gluon.jit
def _make_ring(x_desc, weight_desc):
    xs = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, _ROWS, _INS], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, 2 * _COLUMNS, _INS], weight_desc.layout)
    full, empty = make_barriers(_STAGES, 2)
    return xs, weights, full, empty


@gluon.jit
def _find_tile(tile, row_tiles, column_tiles):
    band = tile // (_BAND * column_tiles)
    height = gl.minimum(row_tiles - band * _BAND, _BAND)
    within = tile - band * _BAND * column_tiles
    return band * _BAND + within % height, within // height


@gluon.jit
def _load_tiles(x_desc, weight_desc, row_tiles, column_tiles, steps, stride, second, ring):
    """Run the copying warp: load input and weights of all tiles into the stages.

    Column tile n consists of _COLUMNS weight rows starting at `n * stride`, and _COLUMNS at `n * stride + second`.
    """
    BYTES: gl.constexpr = (_ROWS + 2 * _COLUMNS) * _INS * 2
    xs, weights, full, empty = ring
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = _find_tile(tile, row_tiles, column_tiles)
        for step in range(steps):
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), turn // _STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma_load(x_desc, [above * _ROWS, step * _INS], ready, xs.index(stage))
            for half in gl.static_range(2):
                place = [left * stride + half * second, step * _INS]
                tma_load(weight_desc, place, ready, weights.index(stage).slice(half * _COLUMNS, _COLUMNS))
            turn += 1


@gluon.jit
def _multiply_tile(GROUP: gl.constexpr, turn, steps, ring):
    """Return a warpgroup's half of the tile after `turn` steps, [_ROWS / 2, 2 * _COLUMNS] float32."""
    HALF: gl.constexpr = _ROWS // 2
    xs, weights, full, empty = ring
    acc = gl.zeros([HALF, 2 * _COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS, 16]))
    for step in range(steps):
        stage = (turn + step) % _STAGES
        mbarrier.wait(full.index(stage), (turn + step) // _STAGES & 1)
        x = xs.index(stage).slice(GROUP * HALF, HALF)
        acc = warpgroup_mma(x, weights.index(stage).permute((1, 0)), acc, is_async=True)
        # Waits for the previous step, whose stage is then free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((turn + step - 1) % _STAGES), pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((turn + steps - 1) % _STAGES))
    return acc


@gluon.jit
def _gate(GROUP: gl.constexpr, out_desc, row_tiles, column_tiles, steps, ring, outs):
    dtype: gl.constexpr = out_desc.dtype
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = _find_tile(tile, row_tiles, column_tiles)
        gate, up = halve(_multiply_tile(GROUP, turn, steps, ring))
        turn += steps
        # Rounds like a separate product.
        gate, up = round_to(gate, dtype), round_to(up, dtype)
        gated = gate / (1 + gl.exp(-gate)) * up
        tma_store_wait(0)
        outs.index(GROUP).store(gated.to(dtype))
        fence_async_shared()
        tma_store(out_desc, [above * _ROWS + GROUP * (_ROWS // 2), left * _COLUMNS], outs.index(GROUP))
    tma_store_wait(0)


@kernel(do_not_specialize=["row_tiles"])
def _persistent_gated_kernel(x_desc, weight_desc, out_desc, row_tiles, column_tiles, steps):
    ring = _make_ring(x_desc, weight_desc)
    outs = gl.allocate_shared_memory(x_desc.dtype, [2, _ROWS // 2, _COLUMNS], out_desc.layout)
    wait_for_previous(True)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    size = column_tiles * _COLUMNS
    gl.warp_specialize(
        [
            (_gate, (FIRST, out_desc, row_tiles, column_tiles, steps, ring, outs)),
            (_gate, (SECOND, out_desc, row_tiles, column_tiles, steps, ring, outs)),
            (_load_tiles, (x_desc, weight_desc, row_tiles, column_tiles, steps, _COLUMNS, size, ring)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def _store_head(head, ptr, places, known, stride):
    dims = gl.arange(0, _HEAD_DIM, gl.SliceLayout(0, _ROW_MAJOR))
    gl.store(
        ptr + places.to(gl.int64)[:, None] * stride + dims[None, :], gl.convert_layout(head, _ROW_MAJOR), known[:, None]
    )


@gluon.jit
def _finish_head(x, head, row, cos, sin, norms, outputs, num_rows, eps, HEADS: gl.constexpr, KV_HEADS: gl.constexpr):
    """Apply QK norm and RoPE to a head, [_ROWS / 2, _HEAD_DIM], and store it; cos, sin: [_ROWS / 2, _HEAD_DIM / 2]."""
    q_norm_ptr, k_norm_ptr = norms
    query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr = outputs
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    rows = row + gl.arange(0, _ROWS // 2, gl.SliceLayout(1, _ROW_MAJOR))
    # Rounds like a separate product; before the branch, because the registers spill otherwise.
    x = round_to(x, dtype)
    if head < HEADS + KV_HEADS:
        first, second = halve(x)
        dims = gl.arange(0, _HEAD_DIM // 2, gl.SliceLayout(0, first.type.layout))
        norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
        scale = rsqrt((gl.sum(first * first, 1) + gl.sum(second * second, 1)) / _HEAD_DIM + eps)[:, None]
        first *= scale * gl.load(norm_ptr + dims).to(gl.float32)[None, :]
        second *= scale * gl.load(norm_ptr + _HEAD_DIM // 2 + dims).to(gl.float32)[None, :]
        rotated = gl.join((first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype))
        rotated = rotated.permute((0, 2, 1)).reshape([_ROWS // 2, _HEAD_DIM])
        if head < HEADS:
            _store_head(rotated, query_ptr + head * _HEAD_DIM, rows, rows < num_rows, HEADS * _HEAD_DIM)
        else:
            slots = gl.load(slot_mapping_ptr + rows, mask=rows < num_rows, other=-1)
            _store_head(rotated, k_cache_ptr + (head - HEADS) * _HEAD_DIM, slots, slots >= 0, KV_HEADS * _HEAD_DIM)
    else:
        slots = gl.load(slot_mapping_ptr + rows, mask=rows < num_rows, other=-1)
        ptr = v_cache_ptr + (head - HEADS - KV_HEADS) * _HEAD_DIM
        _store_head(x.to(dtype), ptr, slots, slots >= 0, KV_HEADS * _HEAD_DIM)


@gluon.jit
def _finish_heads(
    GROUP: gl.constexpr, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Run one warpgroup: multiply half of each tile's rows, and finish the two heads that are the tile's columns."""
    num_rows, row_tiles, column_tiles, steps = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS, 16])
    left_part, _right_part = halve(gl.zeros([_ROWS // 2, 2 * _COLUMNS], gl.float32, ACC))
    half_head, _other_half = halve(left_part)
    LAYOUT: gl.constexpr = half_head.type.layout
    dims = gl.arange(0, _HEAD_DIM // 2, gl.SliceLayout(0, LAYOUT))
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = _find_tile(tile, row_tiles, column_tiles)
        row = above * _ROWS + GROUP * (_ROWS // 2)
        # Loaded before the product, which hides the latency.
        rows = row + gl.arange(0, _ROWS // 2, gl.SliceLayout(1, LAYOUT))
        position = gl.load(positions_ptr + rows, mask=rows < num_rows, other=0)
        cos_ptrs = cos_sin_ptr + (position.to(gl.int64) * _HEAD_DIM)[:, None] + dims[None, :]
        cos, sin = gl.load(cos_ptrs), gl.load(cos_ptrs + _HEAD_DIM // 2)
        first, second = halve(_multiply_tile(GROUP, turn, steps, ring))
        turn += steps
        _finish_head(first, 2 * left, row, cos, sin, norms, outputs, num_rows, eps, HEADS, KV_HEADS)
        _finish_head(second, 2 * left + 1, row, cos, sin, norms, outputs, num_rows, eps, HEADS, KV_HEADS)


@kernel(do_not_specialize=["num_rows", "row_tiles"])
def _persistent_qkv_kernel(
    x_desc, weight_desc, num_rows, row_tiles, column_tiles, steps, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, eps, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    ring = _make_ring(x_desc, weight_desc)
    wait_for_previous(True)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    work = (num_rows, row_tiles, column_tiles, steps)
    norms = (q_norm_ptr, k_norm_ptr)
    outputs = (query_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr)
    gl.warp_specialize(
        [
            (_finish_heads, (FIRST, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps, HEADS, KV_HEADS)),
            (_finish_heads, (SECOND, work, ring, positions_ptr, cos_sin_ptr, norms, outputs, eps, HEADS, KV_HEADS)),
            (_load_tiles, (x_desc, weight_desc, row_tiles, column_tiles, steps, 2 * _COLUMNS, _COLUMNS, ring)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def persistent_gated_gemm(x: torch.Tensor, weight: torch.Tensor, num_programs: int) -> torch.Tensor:
    """Return the product of a gated `norm_linear` of two-byte elements, by at most `num_programs` programs."""
    rows, in_features = x.shape
    out = torch.empty(rows, len(weight) // 2, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = -(-rows // _ROWS.value), len(weight) // (2 * _COLUMNS.value)
    _persistent_gated_kernel[(min(num_programs, row_tiles * column_tiles),)](
        descriptor(x, [_ROWS.value, _INS.value]), descriptor(weight, [_COLUMNS.value, _INS.value]),
        descriptor(out, [_ROWS.value // 2, _COLUMNS.value]), row_tiles, column_tiles, in_features // _INS.value,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def persistent_qkv_rope_store(
    x: torch.Tensor, weight: torch.Tensor, rope: NormRope, positions: torch.Tensor, pages: KVPages,
    slot_mapping: torch.Tensor, num_programs: int,
) -> torch.Tensor:  # fmt: skip
    """Compute `qkv_rope_store` of `x @ weight.T` for two-byte elements, an even number of heads of 128, and norms.

    x: [num_tokens, hidden_size], contiguous; weight: [(num_heads + 2 * num_kv_heads) * 128, hidden_size].
    """
    assert rope.norm_weights is not None
    q_norm, k_norm = rope.norm_weights
    rows, in_features = x.shape
    kv_heads = pages.k_cache.shape[2]
    heads = len(weight) // _HEAD_DIM.value - 2 * kv_heads
    query = torch.empty(rows, heads, _HEAD_DIM.value, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = -(-rows // _ROWS.value), len(weight) // (2 * _COLUMNS.value)
    _persistent_qkv_kernel[(min(num_programs, row_tiles * column_tiles),)](
        descriptor(x, [_ROWS.value, _INS.value]), descriptor(weight, [_COLUMNS.value, _INS.value]),
        rows, row_tiles, column_tiles, in_features // _INS.value, positions, rope.cos_sin, q_norm, k_norm,
        query, pages.k_cache, pages.v_cache, slot_mapping, rope.eps, HEADS=heads, KV_HEADS=kv_heads,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return query
