"""`qkv_rope_store` inside Hopper's decode kernel: each program processes the new token's heads of its KV head."""

from __future__ import annotations

from nanovllm.kernels._gluon import gl, gluon
from nanovllm.kernels.attention.warp_attention import WARPS
from nanovllm.kernels.fast_math import rsqrt


@gluon.constexpr_function
def halves_layout(half):
    """Return the layout of one half of each of a group's heads, [ROWS, half]."""
    return gl.BlockedLayout([1, 4], [128 // half, half // 4], [WARPS, 1], [1, 0])


@gluon.jit
def _norm_and_rotate(first, second, weights, angles, eps, HAS_NORM: gl.constexpr):
    """Apply QK norm and RoPE to heads, given as halves [ROWS, HALF]; rounds like `qkv_rope_store`."""
    dtype: gl.constexpr = first.dtype
    first, second = first.to(gl.float32), second.to(gl.float32)
    cos, sin = angles
    if HAS_NORM:
        size: gl.constexpr = 2 * first.shape[1]
        scale = rsqrt((gl.sum(first * first, axis=1) + gl.sum(second * second, axis=1)) / size + eps)[:, None]
        first *= scale * weights[0].to(gl.float32)
        second *= scale * weights[1].to(gl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@gluon.jit
def load_constants(norms, cos_sin_ptr, position, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
    """Load the halves of both norm weights, and cosines and sines; none depends on the previous kernel."""
    q_norm_ptr, k_norm_ptr = norms
    angle_ptrs = cos_sin_ptr + position.to(gl.int64) * (2 * HALF) + dims
    angles = (gl.load(angle_ptrs)[None, :], gl.load(angle_ptrs + HALF)[None, :])
    q_weights = angles
    k_weights = angles
    if HAS_NORM:
        q_weights = (gl.load(q_norm_ptr + dims)[None, :], gl.load(q_norm_ptr + HALF + dims)[None, :])
        k_weights = (gl.load(k_norm_ptr + dims)[None, :], gl.load(k_norm_ptr + HALF + dims)[None, :])
    return q_weights, k_weights, angles


@gluon.jit
def load_token(
    row_ptr, head, stored, rows, dims, value_dims, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PROJECTED: gl.constexpr
):
    """Load the new token's query heads, halves [ROWS, HEAD_DIM / 2], key, halves [1, HEAD_DIM / 2], and value.

    With PROJECTED all are in the QKV row at `row_ptr`; else key and value are read from the cache, at `stored`.
    """
    HALF: gl.constexpr = dims.shape[0]
    key_ptr, value_ptr = stored
    if PROJECTED:
        key_ptr = row_ptr + (GROUP * KV_HEADS + head) * (2 * HALF)
        value_ptr = row_ptr + ((GROUP + 1) * KV_HEADS + head) * (2 * HALF)
    # Padding rows repeat the group's last head.
    heads = head * GROUP + gl.minimum(rows, GROUP - 1)
    query_ptrs = row_ptr + heads[:, None] * (2 * HALF) + dims[None, :]
    query = (gl.load(query_ptrs), gl.load(query_ptrs + HALF))
    key_ptrs = key_ptr + dims[None, :]
    key = (gl.load(key_ptrs), gl.load(key_ptrs + HALF))
    return query, key, gl.load(value_ptr + value_dims)


@gluon.jit
def finish_token(token, dims, value_dims, constants, eps, kv_slot, stored, HAS_NORM: gl.constexpr):
    """Apply QK norm and RoPE to the new token's heads, and store its key and value unless kv_slot is -1."""
    query, key, value = token
    q_weights, k_weights, angles = constants
    key_ptr, value_ptr = stored
    query = _norm_and_rotate(query[0], query[1], q_weights, angles, eps, HAS_NORM)
    key = _norm_and_rotate(key[0], key[1], k_weights, angles, eps, HAS_NORM)
    if kv_slot >= 0:
        gl.store(key_ptr + dims[None, :], key[0])
        gl.store(key_ptr + dims[None, :] + dims.shape[0], key[1])
        gl.store(value_ptr + value_dims, value)
    return query, key, value
