"""Per-head RMS norm of queries and keys (Qwen3) and rotary embedding (RoPE, Su et al. 2021, arXiv:2104.09864).

One op, because between the projection and the cache there is nothing else, and each alone is a launch and a pass.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import tl, triton


def qk_norm_rope_ref(
    qk: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Plain torch form of `qk_norm_rope`."""
    x = qk.float()
    if weights is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        q_weight, k_weight = weights
        num_kv_heads = qk.shape[1] - num_heads
        x = x * torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))).float()
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qk.dtype)


@triton.jit
def _qk_norm_rope_kernel(
    qk_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, out_ptr, eps, row_stride,
    num_heads, num_rows_heads,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    mask = (heads < num_rows_heads)[:, None]
    offsets = heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(qk_ptr + token * row_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qk_ptr + token * row_stride + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        is_query = (heads < num_heads)[:, None]
        q_first, q_second = tl.load(q_weight_ptr + dims), tl.load(q_weight_ptr + HALF + dims)
        k_first, k_second = tl.load(k_weight_ptr + dims), tl.load(k_weight_ptr + HALF + dims)
        first *= scale * tl.where(is_query, q_first[None, :], k_first[None, :]).to(tl.float32)
        second *= scale * tl.where(is_query, q_second[None, :], k_second[None, :]).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + dims)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + dims)[None, :]
    out_offsets = token * num_rows_heads * (2 * HALF) + offsets
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + out_offsets, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_ptr + HALF + out_offsets, (second * cos + first * sin).to(dtype), mask=mask)


def qk_norm_rope_triton(
    qk: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Triton form of `qk_norm_rope`, one program for a few heads of a token."""
    num_tokens, num_rows_heads, head_dim = qk.shape
    assert qk.stride()[1:] == (head_dim, 1) and cos_sin.is_contiguous()
    out = torch.empty(num_tokens, num_rows_heads, head_dim, dtype=qk.dtype, device=qk.device)
    q_weight, k_weight = weights if weights is not None else (cos_sin, cos_sin)
    heads = 8
    _qk_norm_rope_kernel[(num_tokens, triton.cdiv(num_rows_heads, heads))](
        qk, q_weight, k_weight, cos_sin, positions, out, eps, qk.stride(0), num_heads, num_rows_heads,
        HAS_NORM=weights is not None, HALF=head_dim // 2, HEADS=heads, num_warps=2,
    )  # fmt: skip
    return out


def qk_norm_rope(
    qk: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Normalise each head, if there are weights, and rotate it by its token's position; computed in float32.

    Args:
        qk: [num_tokens, num_heads + num_kv_heads, head_dim], the queries' heads first; rows contiguous.
        weights: of the queries' norm and of the keys', [head_dim] each.
        eps: added to the mean square.
        cos_sin: [max_position, head_dim] float32, cosines then sines of the angles of the head's two halves.
        positions: [num_tokens] int32.
        num_heads: how many of the heads are queries'.

    Returns:
        [num_tokens, num_heads + num_kv_heads, head_dim], contiguous.
    """
    form = qk_norm_rope_triton if qk.is_cuda else qk_norm_rope_ref
    return form(qk, weights, eps, cos_sin, positions, num_heads)
