"""Top-k, top-p and min-p as one cutoff for each row: the least logit that is kept.

Rows are as in `kernels/logits.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl, triton, uses_triton
from nanovllm.kernels.logits import LEAST_TEMPERATURE, EditedRows, largest_logits

_BLOCK = 4096
_LEAST_CANDIDATES = 16
_NUCLEUS_CANDIDATES = 256
"""Candidates for a nucleus without top-k: a trained model's are rarely more."""
_MOST_CANDIDATES = 4096
"""Candidates that one program adds up; a larger top-k sorts the whole rows."""
_BISECTIONS = 40
_SPAN = 110.0
"""exp(-_SPAN) is 0 in float32."""


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


def cutoffs_ref(rows: EditedRows, params: CutoffParams) -> torch.Tensor:
    """Plain torch form of `cutoffs`, which sorts the whole rows."""
    values, _ = rows.x.float().nan_to_num(-math.inf, math.inf, -math.inf).sort(dim=1, descending=True)
    temperatures = params.temperatures.clamp(min=LEAST_TEMPERATURE).unsqueeze(1)
    top = values[:, :1]
    below = torch.where(values == top, 0.0, (values - top) / temperatures)
    least = params.min_p.log().unsqueeze(1)
    has_top_k = params.top_k > 0
    ranks = torch.arange(values.shape[1], device=values.device)
    kept = (below >= least) & ((ranks < params.top_k.unsqueeze(1)) | ~has_top_k.unsqueeze(1))
    weights = torch.where(kept, below.exp(), 0.0)
    sums = weights.cumsum(1)
    mass = (params.top_p * sums[:, -1]).unsqueeze(1)
    kept &= (sums - weights < mass) | (params.top_p >= 1).unsqueeze(1)
    result = values.gather(1, (kept.sum(1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
    # Without top-k, top-p of 1 leaves min-p's cutoff.
    by_min_p = (top + temperatures * least).squeeze(1)
    result = torch.where(has_top_k | (params.top_p < 1), result, by_min_p)
    return torch.where(params.temperatures > 0, result, -math.inf)


@jit
def _weight_above(row_ptr, width, least, top, temperature, BLOCK: tl.constexpr):
    """Return the sum of exp((x - top) / temperature) of the logits x of a row that are at least `least`."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        sums += tl.where(x >= least, tl.exp(tl.where(x == top, 0.0, x - top) / temperature), 0.0)
    return tl.sum(sums, axis=0)


@jit(do_not_specialize=["width", "num_candidates"])
def _cutoffs_kernel(
    x_ptr, values_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cutoffs_ptr, width, num_candidates, span,
    least_temperature, ANY_NUCLEUS: tl.constexpr, BISECTIONS: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    cutoff = -float("inf")
    if temperature > 0:
        temperature = tl.maximum(temperature, least_temperature)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        least = tl.log(tl.load(min_p_ptr + row))
        ranks = tl.arange(0, CANDIDATES)
        row_values_ptr = values_ptr + row * num_candidates
        values = tl.load(row_values_ptr + ranks, mask=ranks < num_candidates, other=-float("inf"))
        top = tl.load(row_values_ptr)
        below = tl.where(values == top, 0.0, (values - top) / temperature)
        kept = (below >= least) & (ranks < tl.where(top_k > 0, top_k, num_candidates))
        weights = tl.where(kept, tl.exp(below), 0.0)
        found = tl.sum(weights, axis=0)
        total = found
        by_min_p = top + temperature * least
        row_ptr = x_ptr + row.to(tl.int64) * width
        is_nucleus = ANY_NUCLEUS & (top_k == 0) & (top_p < 1)
        if is_nucleus:
            # What min-p removes is left out of the sum.
            total = _weight_above(row_ptr, width, by_min_p, top, temperature, BLOCK)
        mass = tl.where(top_p < 1, top_p * total, float("inf"))
        kept &= tl.cumsum(weights, axis=0) - weights < mass
        last = tl.maximum(tl.sum(kept.to(tl.int32), axis=0) - 1, 0)
        # Without top-k, top-p of 1 leaves min-p's cutoff.
        cutoff = tl.where((top_k > 0) | (top_p < 1), tl.load(row_values_ptr + last), by_min_p)
        if is_nucleus & (found < mass):
            low, high = tl.maximum(by_min_p, top - span * temperature), top
            for _ in range(BISECTIONS):
                middle = low + (high - low) * 0.5
                enough = _weight_above(row_ptr, width, middle, top, temperature, BLOCK) >= mass
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            cutoff = low
    tl.store(cutoffs_ptr + row, cutoff)


def cutoffs(rows: EditedRows, params: CutoffParams) -> torch.Tensor:
    """Return the least logit that each row keeps by min-p, then top-k, then top-p, [num_rows] float32.

    Top-p adds up the probabilities of what min-p and top-k have left, as in vLLM. Ties with the least logit are kept.

    Args:
        rows: the logits.
        params: see the class.
    """
    if not uses_triton(rows.device) or params.max_top_k > _MOST_CANDIDATES:
        return cutoffs_ref(rows, params)
    x = rows.x
    width = x.shape[1]
    num_candidates = max(params.max_top_k, _NUCLEUS_CANDIDATES if params.any_nucleus else _LEAST_CANDIDATES)
    # Powers of two, so that few sizes occur.
    padded = triton.next_power_of_2(num_candidates)
    num_candidates = min(width, padded)
    result = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _cutoffs_kernel[(len(x),)](
        x, largest_logits(rows, num_candidates), params.temperatures, params.top_k, params.top_p, params.min_p, result,
        width, num_candidates, _SPAN, LEAST_TEMPERATURE, ANY_NUCLEUS=params.any_nucleus, BISECTIONS=_BISECTIONS,
        CANDIDATES=padded, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return result
