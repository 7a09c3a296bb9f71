"""What a request can ask of its logits beyond a temperature: masks, penalties, cutoffs and log-probabilities.

Only the rows of requests that ask for something come here, as float32 copies of [num_rows, width], whose width is the
vocabulary padded with -inf to a multiple of `WIDTH_UNIT`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl, triton, uses_triton

WIDTH_UNIT = 1024
_BLOCK = 4096
_LEAST_TEMPERATURE = 1e-30
_LEAST_CANDIDATES = 256
"""Candidates for a nucleus without top-k: a trained model's are rarely more."""
_BISECTIONS = 40
_SPAN = 110.0
"""exp(-_SPAN) is 0 in float32."""


@dataclass
class LogitsEdits:
    """What is done to rows of logits before they are divided by the temperature; None leaves them alone.

    Attributes:
        bias: [_, vocab_size] float32; added to the logits; -inf forbids a token.
        bias_rows: [num_rows] int32; each row's row of `bias`, -1 for none.
        counts: [_, vocab_size] int32; twice a token's number in the output so far, plus one if it is in the prompt.
        counts_rows: [num_rows] int32; each row's row of `counts`, -1 for none.
        penalties: [num_rows, 3] float32; presence, frequency and repetition penalty.
        bitmask: [_, ceil(vocab_size / 32)] int32; bit `token % 32` of word `token // 32` allows a token.
        bitmask_rows: [num_rows] int32; each row's row of `bitmask`, -1 for none.
        forbidden: [2, _] int64; row and token id of single tokens that are forbidden, unless nothing else is left.
    """

    bias: torch.Tensor | None = None
    bias_rows: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    counts_rows: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    bitmask: torch.Tensor | None = None
    bitmask_rows: torch.Tensor | None = None
    forbidden: torch.Tensor | None = None


def edit_logits_ref(logits: torch.Tensor, rows: torch.Tensor, vocab_size: int, edits: LogitsEdits) -> torch.Tensor:
    """Plain torch form of `edit_logits`, without `edits.forbidden`."""
    width = -(-vocab_size // WIDTH_UNIT) * WIDTH_UNIT
    out = torch.full((len(rows), width), -math.inf, device=logits.device)
    x = out[:, :vocab_size]
    x.copy_(logits[rows, :vocab_size])
    x.masked_fill_(x.isnan(), -math.inf)
    if edits.bias is not None and edits.bias_rows is not None:
        has = (edits.bias_rows >= 0).unsqueeze(1)
        x += torch.where(has, edits.bias[edits.bias_rows.clamp(min=0)], 0.0)
    if edits.bitmask is not None and edits.bitmask_rows is not None:
        tokens = torch.arange(vocab_size, device=x.device)
        allowed = edits.bitmask[edits.bitmask_rows.clamp(min=0)][:, tokens // 32] >> (tokens % 32) & 1
        x.masked_fill_((allowed == 0) & (edits.bitmask_rows >= 0).unsqueeze(1), -math.inf)
    if edits.counts is not None and edits.counts_rows is not None and edits.penalties is not None:
        counts = edits.counts[edits.counts_rows.clamp(min=0)] * (edits.counts_rows >= 0).unsqueeze(1)
        presence, frequency, repetition = edits.penalties.unsqueeze(2).unbind(1)
        x.copy_(torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x))
        in_output = counts >> 1
        x -= frequency * in_output + presence * (in_output > 0)
    return out


@jit(do_not_specialize=["vocab_size", "width", "mask_stride"])
def _edit_kernel(
    logits_ptr, rows_ptr, out_ptr, bias_ptr, bias_rows_ptr, counts_ptr, counts_rows_ptr, penalties_ptr,
    mask_ptr, mask_rows_ptr, vocab_size, width, logits_stride, mask_stride,
    HAS_BIAS: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < vocab_size
    source = tl.load(rows_ptr + row)
    x = tl.load(logits_ptr + source * logits_stride + columns, mask=is_token, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))  # noqa: PLR0124
    if HAS_BIAS:
        bias_row = tl.load(bias_rows_ptr + row).to(tl.int64)
        x += tl.load(
            bias_ptr + bias_row * vocab_size + columns, mask=columns < tl.where(bias_row >= 0, vocab_size, 0), other=0.0
        )
    if HAS_MASK:
        mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
        words = tl.load(
            mask_ptr + mask_row * mask_stride + columns // 32,
            mask=columns < tl.where(mask_row >= 0, vocab_size, 0),
            other=-1,
        )
        x = tl.where((words >> (columns % 32)) & 1 != 0, x, -float("inf"))
    if HAS_COUNTS:
        counts_row = tl.load(counts_rows_ptr + row).to(tl.int64)
        counts = tl.load(
            counts_ptr + counts_row * vocab_size + columns,
            mask=columns < tl.where(counts_row >= 0, vocab_size, 0),
            other=0,
        )
        presence = tl.load(penalties_ptr + 3 * row)
        frequency = tl.load(penalties_ptr + 3 * row + 1)
        repetition = tl.load(penalties_ptr + 3 * row + 2)
        x = tl.where(counts > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        in_output = counts >> 1
        x -= frequency * in_output.to(tl.float32) + tl.where(in_output > 0, presence, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * width + columns, x, mask=columns < width)


def edit_logits_triton(logits: torch.Tensor, rows: torch.Tensor, vocab_size: int, edits: LogitsEdits) -> torch.Tensor:
    """Triton form of `edit_logits`, without `edits.forbidden`."""
    width = -(-vocab_size // WIDTH_UNIT) * WIDTH_UNIT
    out = torch.empty(len(rows), width, dtype=torch.float32, device=logits.device)
    _edit_kernel[(len(rows), triton.cdiv(width, _BLOCK))](
        logits, rows, out, edits.bias, edits.bias_rows, edits.counts, edits.counts_rows, edits.penalties,
        edits.bitmask, edits.bitmask_rows, vocab_size, width, logits.stride(0),
        0 if edits.bitmask is None else edits.bitmask.stride(0),
        HAS_BIAS=edits.bias is not None, HAS_COUNTS=edits.counts is not None, HAS_MASK=edits.bitmask is not None,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def edit_logits(logits: torch.Tensor, rows: torch.Tensor, vocab_size: int, edits: LogitsEdits) -> torch.Tensor:
    """Return rows of logits after biases, masks and penalties, in vLLM's order, in float32.

    Args:
        logits: [_, vocab_size or more], any float dtype; NaN counts as -inf.
        rows: [num_rows] int64; which of them.
        vocab_size: columns that are tokens.
        edits: what to do to them.

    Returns:
        [num_rows, width] float32; see the module.
    """
    form = edit_logits_triton if uses_triton(logits.device) else edit_logits_ref
    out = form(logits, rows, vocab_size, edits)
    if edits.forbidden is not None:
        rows_of, token_ids = edits.forbidden
        before = out[rows_of, token_ids]
        out[rows_of, token_ids] = -math.inf
        # Where nothing else is left, they may come.
        out[rows_of, token_ids] = torch.where(out.amax(1)[rows_of] == -math.inf, before, -math.inf)
    return out


def row_stats_ref(
    x: torch.Tensor, temperatures: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `row_stats`."""
    scaled = x if temperatures is None else x / temperatures.clamp(min=_LEAST_TEMPERATURE).unsqueeze(1)
    greater = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if token_ids is not None:
        greater = (x > x.gather(1, token_ids.unsqueeze(1))).sum(1)
    return torch.logsumexp(scaled, 1), greater


@jit(do_not_specialize=["width"])
def _stats_kernel(
    x_ptr, temperatures_ptr, token_ids_ptr, maxima_ptr, sums_ptr, greater_ptr, width, least_temperature,
    HAS_TEMPERATURES: tl.constexpr, HAS_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    row_ptr = x_ptr + row.to(tl.int64) * width
    x = tl.load(row_ptr + columns, mask=columns < width, other=-float("inf"))
    place = row * tl.num_programs(1) + part
    if HAS_TOKENS:
        own = tl.load(row_ptr + tl.load(token_ids_ptr + row))
        tl.store(greater_ptr + place, tl.sum((x > own).to(tl.int32), axis=0))
    if HAS_TEMPERATURES:
        x /= tl.maximum(tl.load(temperatures_ptr + row), least_temperature)
    top = tl.max(x, axis=0)
    # A block of -inf alone adds nothing, where -inf minus itself would be NaN.
    tl.store(maxima_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - top)), axis=0))


def row_stats_triton(
    x: torch.Tensor, temperatures: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton form of `row_stats`: a kernel over blocks of columns, whose results torch adds up."""
    num_rows, width = x.shape
    parts = triton.cdiv(width, _BLOCK)
    maxima, sums = x.new_empty(2, num_rows, parts)
    greater = torch.zeros(num_rows, parts, dtype=torch.int32, device=x.device)
    _stats_kernel[(num_rows, parts)](
        x, temperatures, token_ids, maxima, sums, greater, width, _LEAST_TEMPERATURE,
        HAS_TEMPERATURES=temperatures is not None, HAS_TOKENS=token_ids is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return torch.logsumexp(maxima + sums.log(), 1), greater.sum(1)


def row_stats(
    x: torch.Tensor, temperatures: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log-sum-exp, [num_rows] float32, and how many of its logits exceed a token's, [num_rows] int64.

    Args:
        x: [num_rows, width] float32, contiguous.
        temperatures: [num_rows] float32; divide the logits, for the log-sum-exp. None for 1.
        token_ids: [num_rows] int64; None gives zeros.
    """
    return (row_stats_triton if uses_triton(x.device) else row_stats_ref)(x, temperatures, token_ids)


def top_values(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits of each row in descending order, and their token ids, [num_rows, k] each.

    They are in those k chunks of a row that have the largest maxima, so that only the maxima and these chunks are
    sorted.

    Args:
        x: [num_rows, width] float32, contiguous; width a multiple of `WIDTH_UNIT`.
        k: at most width.
    """
    width = x.shape[1]
    chunk = min(512, 2 ** max(4, round(math.log2(math.sqrt(width / k)))))
    if 8 * k * chunk > width:
        values, ids = torch.topk(x, k, dim=1)
        return values, ids
    chunks = x.view(len(x), -1, chunk)
    best = chunks.amax(2).topk(k, dim=1, sorted=False).indices
    candidates = chunks.gather(1, best.unsqueeze(2).expand(-1, -1, chunk)).flatten(1)
    values, places = candidates.topk(k, dim=1)
    return values, best.gather(1, places // chunk) * chunk + places % chunk


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


def cutoffs(x: torch.Tensor, params: CutoffParams) -> torch.Tensor:
    """Return the least logit that each row keeps by min-p, then top-k, then top-p, [num_rows] float32.

    Top-p adds up the probabilities of what min-p and top-k have left, as in vLLM. Ties with the least logit are kept.

    Args:
        x: [num_rows, width] float32, contiguous; width a multiple of `WIDTH_UNIT`.
        params: see the class.
    """
    width, has_kernels = x.shape[1], uses_triton(x.device)
    num_candidates = max(params.max_top_k, _LEAST_CANDIDATES if params.any_nucleus else 1)
    # Powers of two, so that few sizes occur.
    num_candidates = min(width, 1 << (num_candidates - 1).bit_length()) if has_kernels else width
    values, _ = top_values(x, num_candidates)
    temperatures = params.temperatures.clamp(min=_LEAST_TEMPERATURE).unsqueeze(1)
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


def token_logprobs(
    x: torch.Tensor, token_ids: torch.Tensor, k: int, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of given tokens and of the k most likely ones.

    Args:
        x: [num_rows, width] float32, contiguous; width a multiple of `WIDTH_UNIT`.
        token_ids: [num_rows] int64.
        k: most likely tokens to return, at least 0.
        temperatures: [num_rows] float32; divide the logits, but for zeros. None for 1.

    Returns:
        Log-probabilities, [num_rows, 1 + k] float32, the given token's first; their token ids, [num_rows, 1 + k] int64;
        and the given token's rank, [num_rows] int64, from 1.
    """
    if temperatures is not None:
        temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    log_total, greater = row_stats(x, temperatures, token_ids)
    ids = token_ids.unsqueeze(1)
    values = x.gather(1, ids)
    if k:
        top, top_ids = top_values(x, k)
        values, ids = torch.cat((values, top), 1), torch.cat((ids, top_ids), 1)
    if temperatures is not None:
        values = values / temperatures.unsqueeze(1)
    return values - log_total.unsqueeze(1), ids, greater + 1
