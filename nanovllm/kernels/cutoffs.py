"""Top-k, top-p and min-p as one cutoff for each row: the least logit that is kept.

Rows are float32, [num_rows, width]; see `kernels/logits.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl, uses_triton
from nanovllm.kernels.logits import LEAST_TEMPERATURE, EditedRows, row_stats, top_values

_BLOCK = 4096
_LEAST_CANDIDATES = 256
"""Candidates for a nucleus without top-k: a trained model's are rarely more."""
_BISECTIONS = 40
_SPAN = 110.0
"""exp(-_SPAN) is 0 in float32."""


@jit(do_not_specialize=["width"])
def _nucleus_kernel(
    x_ptr, temperatures_ptr, lows_ptr, masses_ptr, needed_ptr, cutoffs_ptr, width, span,
    BISECTIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(needed_ptr + row) != 0:
        row_ptr = x_ptr + row.to(tl.int64) * width
        temperature = tl.load(temperatures_ptr + row)
        mass = tl.load(masses_ptr + row)
        top = tl.load(cutoffs_ptr + row)
        low, high = tl.maximum(tl.load(lows_ptr + row), top - span * temperature), top
        for _ in range(BISECTIONS):
            middle = low + (high - low) * 0.5
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + columns, mask=columns < width, other=-float("inf"))
                total += tl.where(x >= middle, tl.exp((x - top) / temperature), 0.0)
            enough = tl.sum(total, axis=0) >= mass
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        tl.store(cutoffs_ptr + row, low)


@dataclass
class CutoffParams:
    """Truncation of the rows' distributions.

    Attributes:
        temperatures: [num_rows] float32; rows of 0 are not truncated.
        top_k: [num_rows] int32; 0 keeps all.
        top_p, min_p: [num_rows] float32.
        max_top_k: at least the largest top_k.
        any_nucleus: whether a row has top_p without top_k.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    max_top_k: int
    any_nucleus: bool


def cutoffs(rows: EditedRows, params: CutoffParams) -> torch.Tensor:
    """Return the least logit that each row keeps by min-p, then top-k, then top-p, [num_rows] float32.

    Top-p adds up the probabilities of what min-p and top-k have left, as in vLLM. Ties with the least logit are kept.

    Args:
        rows: the logits.
        params: see the class.
    """
    x = rows.x
    width, has_kernels = x.shape[1], uses_triton(x.device)
    num_candidates = max(params.max_top_k, _LEAST_CANDIDATES if params.any_nucleus else 1)
    # Powers of two, so that few sizes occur.
    num_candidates = min(width, 1 << (num_candidates - 1).bit_length()) if has_kernels else width
    values, _ = top_values(rows, num_candidates)
    temperatures = params.temperatures.clamp(min=LEAST_TEMPERATURE).unsqueeze(1)
    top = values[:, :1]
    below = torch.where(values == top, 0.0, (values - top) / temperatures)
    least = params.min_p.log().unsqueeze(1)
    has_top_k = params.top_k > 0
    ranks = torch.arange(num_candidates, device=x.device)
    kept = (below >= least) & ((ranks < params.top_k.unsqueeze(1)) | ~has_top_k.unsqueeze(1))
    weights = torch.where(kept, below.exp(), 0.0)
    sums = weights.cumsum(1)
    total = sums[:, -1]
    if has_kernels and params.any_nucleus:
        # What min-p removes is left out of the sum.
        lowest = top + temperatures * least
        masked = torch.where(x >= lowest, x, -math.inf)
        log_total, _ = row_stats(masked, params.temperatures)
        total = torch.where(has_top_k, total, (log_total - (top / temperatures).squeeze(1)).exp())
    mass = params.top_p * total
    kept &= (sums - weights < mass.unsqueeze(1)) | (params.top_p >= 1).unsqueeze(1)
    result = values.gather(1, (kept.sum(1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
    # Without top-k, top-p of 1 leaves min-p's cutoff.
    by_min_p = (top + temperatures * least).squeeze(1)
    result = torch.where(has_top_k | (params.top_p < 1), result, by_min_p)
    if has_kernels and params.any_nucleus:
        needed = ~has_top_k & (params.top_p < 1) & (sums[:, -1] < mass) & (params.temperatures > 0)
        result = torch.where(needed, top.squeeze(1), result)
        _nucleus_kernel[(len(x),)](
            x, params.temperatures, by_min_p, mass, needed.int(), result, width, _SPAN, BISECTIONS=_BISECTIONS,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return torch.where(params.temperatures > 0, result, -math.inf)
