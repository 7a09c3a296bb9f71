"""Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022): fold in a key tile, or other states.

Products of float32 inputs are IEEE float32, never tf32.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.fast_math import exp2

LOG2E = 1.4426950408889634
"""Factor of the scores, so that the softmax can use base 2."""


@jit
def attend_tile(
    query, k_ptr, v_ptr, table_ptr, table_size, start, key_mask, score_mask, scale, row_stride, acc, row_max, row_sum,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fold keys `start ... start + TILE - 1`, `start` a multiple of TILE, into the softmax (acc, row_max, row_sum).

    query: [M, HEAD_DIM]. k_ptr, v_ptr: the KV head's first row in the caches. table_ptr: block table of table_size
    entries. row_stride: elements between the rows of two tokens. key_mask: [TILE], which keys exist; score_mask:
    broadcast to [M, TILE], which keys each row sees; both None for all. acc: [M, HEAD_DIM], row_max, row_sum: [M]
    float32.
    """
    dims = tl.arange(0, HEAD_DIM)
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies in one block, so one look-up suffices.
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        rows = (block * BLOCK_SIZE + start % BLOCK_SIZE + offsets) * row_stride
    else:
        # Beyond the last key this reads later table entries, which are valid block ids, or zeros beyond the table.
        places = (start + offsets) // BLOCK_SIZE
        blocks = tl.load(table_ptr + places, mask=places < table_size, other=0).to(tl.int64)
        rows = (blocks * BLOCK_SIZE + (start + offsets) % BLOCK_SIZE) * row_stride
    # The scale is applied where the maximum is subtracted, so that both are one fused operation.
    if key_mask is None:
        key = tl.load(k_ptr + rows[None, :] + dims[:, None])
        scores = tl.dot(query, key, input_precision="ieee")
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        safe_max = new_max
    else:
        key = tl.load(k_ptr + rows[None, :] + dims[:, None], mask=key_mask[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee")
        scores = tl.where(score_mask, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        # A row that has seen no key has maximum -inf; -inf - -inf would be NaN.
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = exp2(scores * scale - safe_max[:, None])
    correction = exp2(row_max - safe_max)
    if key_mask is None:
        value = tl.load(v_ptr + rows[:, None] + dims[None, :])
    else:
        value = tl.load(v_ptr + rows[:, None] + dims[None, :], mask=key_mask[:, None], other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum * correction + tl.sum(weights, axis=1)


@jit
def merge_states(lse, outputs, acc, top, total):
    """Fold normalised outputs [N, HEAD_DIM] with base-2 log-sum-exp lse [N] (-inf: none) into one state.

    The state is acc [HEAD_DIM], the maximum `top` and the sum `total`, and is returned.
    """
    new_top = tl.maximum(top, tl.max(lse, axis=0))
    weights = exp2(lse - new_top)
    correction = exp2(top - new_top)
    acc = acc * correction + tl.sum(outputs * weights[:, None], axis=0)
    return acc, new_top, total * correction + tl.sum(weights, axis=0)
