"""Masks, penalties, truncation and log-probabilities: all that a request can ask of its logits beyond a temperature.

Only the rows of requests that ask for something come here, [num_rows, width]. Rows with edits are float32 copies, whose
width is the vocabulary padded with -inf to a multiple of `WIDTH_UNIT`; rows without are the model's own logits if
their width allows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl, triton, uses_triton

WIDTH_UNIT = 1024
CHUNK = 64
"""Columns per maximum that is kept: the 64 largest of 151,936 are found in 2,374 maxima and 4,096 logits."""
_BLOCK = 4096
LEAST_TEMPERATURE = 1e-30
_LEAST_CANDIDATES = 16
_NUCLEUS_CANDIDATES = 256
"""Candidates for a nucleus without top-k: a trained model's are rarely more."""
_MOST_CANDIDATES = 4096
"""Candidates that one program adds up; a larger top-k sorts the whole rows."""
_BISECTIONS = 40
_SPAN = 110.0
"""exp(-_SPAN) is 0 in float32."""


@dataclass
class LogitsEdits:
    """Changes to rows of logits before they are divided by the temperature; None leaves them alone.

    Attributes:
        bias: [_, vocab_size] float32; added to the logits; -inf forbids a token.
        counts: [_, vocab_size] int32; twice a token's number in the output so far, plus one if it is in the prompt.
        penalties: [num_rows, 3] float32; presence, frequency and repetition penalty.
        bitmask: [_, ceil(vocab_size / 32)] int32; bit `token % 32` of word `token // 32` allows a token.
        bias_rows, counts_rows, bitmask_rows: [num_rows] int32; each row's row of these, -1 for none.
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

    @property
    def is_empty(self) -> bool:
        """Whether nothing is done."""
        return all(value is None for value in vars(self).values())


@dataclass
class EditedRows:
    """Rows of logits after edits.

    Attributes:
        x: [num_rows, width], any float dtype; NaN counts as -inf; see the module.
        maxima: [num_rows, width / CHUNK] float32; of each chunk of columns.
    """

    x: torch.Tensor
    maxima: torch.Tensor

    def above(self, cutoffs: torch.Tensor) -> EditedRows:
        """Return the rows with -inf for logits below their cutoffs, [num_rows]."""
        return EditedRows(*(t.masked_fill(t < cutoffs.unsqueeze(1), -math.inf) for t in (self.x, self.maxima)))

    def __getitem__(self, rows: torch.Tensor) -> EditedRows:
        return EditedRows(self.x[rows], self.maxima[rows])


def edit_logits_ref(logits: torch.Tensor, rows: torch.Tensor, vocab_size: int, edits: LogitsEdits) -> EditedRows:
    """Plain torch form of `edit_logits`."""
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
    _forbid(out, edits.forbidden)
    return EditedRows(out, out.view(len(out), -1, CHUNK).amax(2))


def _forbid(x: torch.Tensor, forbidden: torch.Tensor | None) -> None:
    """Set forbidden tokens to -inf, except in rows in which nothing else is left."""
    if forbidden is not None:
        rows, token_ids = forbidden
        before = x[rows, token_ids]
        x[rows, token_ids] = -math.inf
        x[rows, token_ids] = torch.where(x.amax(1)[rows] == -math.inf, before, -math.inf)


@jit(do_not_specialize=["vocab_size", "width", "mask_stride"])
def _edit_kernel(
    logits_ptr, rows_ptr, out_ptr, maxima_ptr, bias_ptr, bias_rows_ptr, counts_ptr, counts_rows_ptr, penalties_ptr,
    mask_ptr, mask_rows_ptr, vocab_size, width, logits_stride, mask_stride,
    COPIES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < vocab_size
    source = row.to(tl.int64)
    if COPIES:
        source = tl.load(rows_ptr + row)
    x = tl.load(logits_ptr + source * logits_stride + columns, mask=is_token, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))  # noqa: PLR0124
    if bias_ptr is not None:
        bias_row = tl.load(bias_rows_ptr + row).to(tl.int64)
        x += tl.load(
            bias_ptr + bias_row * vocab_size + columns, mask=columns < tl.where(bias_row >= 0, vocab_size, 0), other=0.0
        )
    if mask_ptr is not None:
        mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
        words = tl.load(
            mask_ptr + mask_row * mask_stride + columns // 32,
            mask=columns < tl.where(mask_row >= 0, vocab_size, 0),
            other=-1,
        )
        x = tl.where((words >> (columns % 32)) & 1 != 0, x, -float("inf"))
    if counts_ptr is not None:
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
    if COPIES:
        tl.store(out_ptr + row.to(tl.int64) * width + columns, x, mask=columns < width)
    chunks = tl.program_id(1) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    maxima = tl.max(tl.reshape(x, [BLOCK // CHUNK, CHUNK]), axis=1)
    tl.store(maxima_ptr + row * (width // CHUNK) + chunks, maxima, mask=chunks < width // CHUNK)


def edit_logits(logits: torch.Tensor, rows: torch.Tensor, vocab_size: int, edits: LogitsEdits) -> EditedRows:
    """Return rows of logits after biases, masks and penalties, in vLLM's order.

    logits: [_, vocab_size or more], any float dtype, NaN counts as -inf; rows: [num_rows] int64, in ascending order.
    """
    if not uses_triton(logits.device):
        return edit_logits_ref(logits, rows, vocab_size, edits)
    copies = not edits.is_empty or logits.shape[1] != vocab_size or vocab_size % CHUNK != 0
    if copies:
        width = -(-vocab_size // WIDTH_UNIT) * WIDTH_UNIT
        out = torch.empty(len(rows), width, dtype=torch.float32, device=logits.device)
    else:
        width = vocab_size
        out = logits = logits if len(rows) == len(logits) else logits[rows]
    maxima = torch.empty(len(rows), width // CHUNK, dtype=torch.float32, device=logits.device)
    _edit_kernel[(len(rows), triton.cdiv(width, _BLOCK))](
        logits, rows, out, maxima, edits.bias, edits.bias_rows, edits.counts, edits.counts_rows, edits.penalties,
        edits.bitmask, edits.bitmask_rows, vocab_size, width, logits.stride(0),
        0 if edits.bitmask is None else edits.bitmask.stride(0), COPIES=copies, BLOCK=_BLOCK, CHUNK=CHUNK,
    )  # fmt: skip
    # A maximum that is forbidden now only adds its chunk to the candidates.
    _forbid(out, edits.forbidden)
    return EditedRows(out, maxima)


def row_stats_ref(
    x: torch.Tensor, temperatures: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `row_stats`."""
    x = x.float().nan_to_num(-math.inf, math.inf, -math.inf)
    scaled = x if temperatures is None else x / temperatures.clamp(min=LEAST_TEMPERATURE).unsqueeze(1)
    greater = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if token_ids is not None:
        greater = (x > x.gather(1, token_ids.unsqueeze(1))).sum(1)
    return torch.logsumexp(scaled, 1), greater


@jit(do_not_specialize=["width"])
def _stats_kernel(
    x_ptr, temperatures_ptr, token_ids_ptr, maxima_ptr, sums_ptr, greater_ptr, width, least_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    row_ptr = x_ptr + row.to(tl.int64) * width
    x = tl.load(row_ptr + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))  # noqa: PLR0124
    place = row * tl.num_programs(1) + part
    if token_ids_ptr is not None:
        own = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
        tl.store(greater_ptr + place, tl.sum((x > own).to(tl.int32), axis=0))
    if temperatures_ptr is not None:
        x /= tl.maximum(tl.load(temperatures_ptr + row), least_temperature)
    top = tl.max(x, axis=0)
    # A block of -inf alone adds nothing, where -inf minus itself would be NaN.
    tl.store(maxima_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - top)), axis=0))


def row_stats(
    x: torch.Tensor, temperatures: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log-sum-exp, [num_rows] float32, and how many of its logits exceed a token's, [num_rows] int64.

    x: [num_rows, width], any float dtype, contiguous, NaN counts as -inf; temperatures: [num_rows] float32, divide the
    logits, for the log-sum-exp, None for 1; token_ids: [num_rows] int64; None gives zeros.
    """
    if not uses_triton(x.device):
        return row_stats_ref(x, temperatures, token_ids)
    num_rows, width = x.shape
    parts = triton.cdiv(width, _BLOCK)
    maxima, sums = torch.empty(2, num_rows, parts, dtype=torch.float32, device=x.device)
    greater = torch.zeros(num_rows, parts, dtype=torch.int32, device=x.device)
    _stats_kernel[(num_rows, parts)](
        x, temperatures, token_ids, maxima, sums, greater, width, LEAST_TEMPERATURE, BLOCK=_BLOCK
    )
    return torch.logsumexp(maxima + sums.log(), 1), greater.sum(1)


def _candidates(rows: EditedRows, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits among which are the k largest of each row, [num_rows, _] float32, and their chunks; None: all."""
    # The k largest are in those k chunks of a row that have the largest maxima.
    x, best = rows.x, None
    if 8 * k * CHUNK <= x.shape[1] and uses_triton(x.device):
        best = rows.maxima.topk(k, dim=1, sorted=False).indices
        x = x.view(len(x), -1, CHUNK).gather(1, best.unsqueeze(2).expand(-1, -1, CHUNK)).flatten(1)
    return x.float().nan_to_num(-math.inf, math.inf, -math.inf), best


def top_values(rows: EditedRows, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits of each row in descending order, [num_rows, k] float32, and their token ids, int64.

    k: at most the width.
    """
    candidates, best = _candidates(rows, k)
    values, places = candidates.topk(k, dim=1)
    return values, places if best is None else best.gather(1, places // CHUNK) * CHUNK + places % CHUNK


def own_logprobs(
    x: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor | None = None,
    top: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return log-probabilities of given tokens, then of further ones, [num_rows, 1 + k] float32; all token ids, int64;
    and the given tokens' ranks, [num_rows] int64, from 1.

    x, token_ids, temperatures: see `row_stats`, temperatures of 0 do not divide; top: logits and token ids of the
    further tokens, [num_rows, k] each.
    """
    if temperatures is not None:
        temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    log_total, greater = row_stats(x, temperatures, token_ids)
    ids = token_ids.unsqueeze(1)
    values = x.gather(1, ids).float()
    if top is not None:
        values, ids = torch.cat((values, top[0]), 1), torch.cat((ids, top[1]), 1)
    if temperatures is not None:
        values = values / temperatures.unsqueeze(1)
    return values - log_total.unsqueeze(1), ids, greater + 1


def token_logprobs(
    rows: EditedRows, token_ids: torch.Tensor, k: int, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `own_logprobs` of given tokens and of the k >= 0 most likely ones."""
    return own_logprobs(rows.x, token_ids, temperatures, top_values(rows, k) if k else None)


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
    """
    x = rows.x
    if not uses_triton(x.device) or params.max_top_k > _MOST_CANDIDATES:
        return cutoffs_ref(rows, params)
    width = x.shape[1]
    num_candidates = max(params.max_top_k, _NUCLEUS_CANDIDATES if params.any_nucleus else _LEAST_CANDIDATES)
    # Powers of two, so that few sizes occur.
    padded = triton.next_power_of_2(num_candidates)
    num_candidates = min(width, padded)
    largest = _candidates(rows, num_candidates)[0].topk(num_candidates, dim=1).values
    result = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _cutoffs_kernel[(len(x),)](
        x, largest, params.temperatures, params.top_k, params.top_p, params.min_p, result, width, num_candidates,
        _SPAN, LEAST_TEMPERATURE, ANY_NUCLEUS=params.any_nucleus, BISECTIONS=_BISECTIONS,
        CANDIDATES=padded, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return result
