"""Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022): fold in a key tile, or other states.

Products of float32 inputs are IEEE float32, never tf32.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.e4m3 import from_e4m3
from nanovllm.kernels.fast_math import exp2, tanh, to_float16

LOG2E = 1.4426950408889634
"""Factor of the scores, so that the softmax can use base 2."""
LOG2E_IN_KERNEL = tl.constexpr(LOG2E)


@jit
def attend_tile(
    query, pages, start, key_mask, score_mask, scale, cap_scale, softmax,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Fold keys `start ... start + TILE - 1`, `start` a multiple of TILE, into the softmax (acc, row_max, row_sum).

    query: [M, KEY_DIM], `beside_keys`. pages: the KV head's first key and value, block table, its size, and elements
    from a key and from a value to the next token's; e4m3 as bytes. key_mask: [TILE], which keys exist; score_mask:
    broadcast to [M, TILE], which keys each row sees; both None for all. scale, cap_scale: see
    `AttentionOptions.score_scales`, `by_head`. acc: [M, VALUE_DIM]; row_max, row_sum: [M] float32. Sizes of heads are
    padded to a power of two with zeros.
    """
    k_ptr, v_ptr, table_ptr, table_size, key_stride, value_stride = pages
    acc, row_max, row_sum = softmax
    key_dims = tl.arange(0, query.shape[1])
    value_dims = tl.arange(0, acc.shape[1])
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies in one block, so one look-up suffices.
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        rows = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        # Beyond the last key this reads later table entries, which are valid block ids, or zeros beyond the table.
        places = (start + offsets) // BLOCK_SIZE
        blocks = tl.load(table_ptr + places, mask=places < table_size, other=0).to(tl.int64)
        rows = blocks * BLOCK_SIZE + (start + offsets) % BLOCK_SIZE
    key_ptrs = k_ptr + (rows * key_stride)[None, :] + key_dims[:, None]
    value_ptrs = v_ptr + (rows * value_stride)[:, None] + value_dims[None, :]
    # The scale is applied where the maximum is subtracted, so that both are one fused operation.
    if key_mask is None:
        key = load_heads(key_ptrs, None, key_dims[:, None], KEY_DIM, query.shape[1])
    else:
        key = load_heads(key_ptrs, key_mask[None, :], key_dims[:, None], KEY_DIM, query.shape[1])
    if k_ptr.dtype.element_ty == tl.uint8:
        key = from_e4m3(key, tl.float16, NATIVE).to(query.dtype)
    scores = tl.dot(query, key, input_precision="ieee")
    if cap_scale is not None:
        scores = tanh(scores * cap_scale)
    if key_mask is None:
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        safe_max = new_max
    else:
        scores = tl.where(score_mask, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        # A row that has seen no key has maximum -inf; -inf - -inf would be NaN.
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = exp2(scores * scale - safe_max[:, None])
    correction = exp2(row_max - safe_max)
    if key_mask is None:
        value = load_heads(value_ptrs, None, value_dims[None, :], VALUE_DIM, acc.shape[1])
    else:
        value = load_heads(value_ptrs, key_mask[:, None], value_dims[None, :], VALUE_DIM, acc.shape[1])
    if v_ptr.dtype.element_ty == tl.uint8:
        value = from_e4m3(value, tl.float16, NATIVE).to(query.dtype)
    acc = tl.dot(weights.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum * correction + tl.sum(weights, axis=1)


@jit
def by_head(x, scale_ptr, kv_head):
    """Return x times the scale of a KV head in pages of e4m3; of others scale_ptr is None, and x stays as it is."""
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + kv_head)
    return x


@jit
def beside_keys(query, k_ptr):
    """Return the query of `attend_tile`: in float16 beside keys of e4m3, which GPUs convert fast to that only."""
    if k_ptr.dtype.element_ty == tl.uint8 and query.dtype != tl.float32:
        query = to_float16(query.to(tl.float32))
    return query


@jit
def load_heads(ptrs, mask, dims, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load heads of DIM elements: zeros from there up to PADDED, and where `mask`, if it is not None, is false."""
    # One return: what follows one in a branch is compiled, too.
    if mask is None:
        heads = tl.load(ptrs) if PADDED == DIM else tl.load(ptrs, mask=dims < DIM, other=0.0)
    elif PADDED == DIM:
        heads = tl.load(ptrs, mask=mask, other=0.0)
    else:
        heads = tl.load(ptrs, mask=mask & (dims < DIM), other=0.0)
    return heads
