"""RMS norms over all heads of queries, and all of keys, at once (OLMo 2, arXiv:2501.00656), in place.

Of several ranks each has some heads: their `sum_squares` are added up before `normalize_qk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.fast_math import rsqrt


class QKNorms(NamedTuple):
    """The norms of queries and of keys.

    Attributes:
        q_weight, k_weight: [q_size] and [k_size], of this rank's heads.
        q_width, k_width: elements of the heads of all ranks.
        eps: added to the mean square.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    q_width: int
    k_width: int
    eps: float


def _parts(qkv: torch.Tensor, norms: QKNorms) -> tuple[torch.Tensor, torch.Tensor]:
    q_size, k_size = len(norms.q_weight), len(norms.k_weight)
    return qkv[:, :q_size], qkv[:, q_size : q_size + k_size]


def sum_squares_ref(qkv: torch.Tensor, norms: QKNorms) -> torch.Tensor:
    """Plain torch form of `sum_squares`."""
    return torch.stack([part.float().square().sum(1) for part in _parts(qkv, norms)], dim=1)


def normalize_qk_ref(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None = None) -> None:
    """Plain torch form of `normalize_qk`."""
    squares = sum_squares_ref(qkv, norms) if squares is None else squares
    scales = torch.rsqrt(squares / squares.new_tensor([norms.q_width, norms.k_width]) + norms.eps)
    query, key = _parts(qkv, norms)
    query.copy_(query.float() * scales[:, :1] * norms.q_weight.float())
    key.copy_(key.float() * scales[:, 1:] * norms.k_weight.float())


@jit
def _qk_norm_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, squares_ptr, eps, q_width, k_width, row_stride,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr, ONLY_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    # Of queries if the part is 0, of keys if it is 1.
    q_mask, k_mask = offsets < Q_SIZE * (1 - part), offsets < K_SIZE * part
    mask, width = q_mask | k_mask, q_width * (1 - part) + k_width * part
    weight = tl.load(q_weight_ptr + offsets, mask=q_mask, other=0.0)
    weight += tl.load(k_weight_ptr + offsets, mask=k_mask, other=0.0)
    wait_for_previous(PDL)
    ptrs = qkv_ptr + row * row_stride + part * Q_SIZE + offsets
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if ONLY_SUMS:
        tl.store(squares_ptr + 2 * row + part, tl.sum(x * x, axis=0))
    else:
        square = tl.sum(x * x, axis=0) if squares_ptr is None else tl.load(squares_ptr + 2 * row + part)
        scale = rsqrt(square / width + eps)
        tl.store(ptrs, (x * scale * weight.to(tl.float32)).to(qkv_ptr.dtype.element_ty), mask=mask)


def _launch(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None, **options: Any) -> None:
    q_size, k_size = len(norms.q_weight), len(norms.k_weight)
    assert qkv.stride(1) == 1
    block = triton.next_power_of_2(max(q_size, k_size))
    _qk_norm_kernel[(len(qkv), 2)](
        qkv, norms.q_weight, norms.k_weight, squares, norms.eps, norms.q_width, norms.k_width, qkv.stride(0),
        Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block, num_warps=min(8, max(1, block // 512)),
        **options, **pdl_options(qkv.device),
    )  # fmt: skip


def sum_squares(qkv: torch.Tensor, norms: QKNorms) -> torch.Tensor:
    """Return the sums of squares of this rank's queries and keys, [num_rows, 2] float32; arguments as below."""
    if not uses_triton(qkv.device):
        return sum_squares_ref(qkv, norms)
    squares = torch.empty(len(qkv), 2, dtype=torch.float32, device=qkv.device)
    _launch(qkv, norms, squares, ONLY_SUMS=True)
    return squares


def normalize_qk(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None = None) -> None:
    """Normalise queries and keys in place, computed in float32.

    Args:
        qkv: [num_rows, q_size + k_size + elements of values]; rows contiguous.
        norms: of the queries and of the keys.
        squares: [num_rows, 2] float32; the sums of squares of all ranks; None of one rank alone.
    """
    if not uses_triton(qkv.device):
        normalize_qk_ref(qkv, norms, squares)
    else:
        _launch(qkv, norms, squares, ONLY_SUMS=False)
