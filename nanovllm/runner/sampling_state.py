"""What running requests ask of sampling beyond a temperature, by slot.

Only such requests have an entry, and only steps that sample for one of them look here. Their token counts and biases
are rows of pools on the device, which grow when they are full.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.kernels.cutoffs import CutoffParams
from nanovllm.kernels.logits import LogitsEdits
from nanovllm.runner.messages import NewRequest, SamplingOptions, TokenMasks

_LEAST_ROWS = 8


@dataclass
class _Slot:
    """One slot's options, and its rows of the pools; -1 for none."""

    options: SamplingOptions
    num_prompt_tokens: int
    bias_row: int
    counts_row: int


@dataclass
class SamplingRows:
    """The rows of a step that ask for more than a temperature.

    Attributes:
        rows: [num_rows] int64; which of the step's logits.
        edits: of the logits, before the temperature.
        cutoffs: None if no row has top-k, top-p or min-p.
        counted: [num_counted] int64; indices among these rows of those whose tokens are counted.
        logprob_rows: of the step's logits, those that log-probabilities are asked for.
        logprobs: [num_logprob_rows] int64; indices among these rows of the same.
        num_logprobs: most likely tokens to return with each.
    """

    rows: torch.Tensor
    edits: LogitsEdits
    cutoffs: CutoffParams | None
    counted: torch.Tensor | None
    logprob_rows: list[int]
    logprobs: torch.Tensor
    num_logprobs: int


class _Pool:
    """Rows of [vocab_size] on the device, handed out one at a time."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(0, vocab_size, dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        if not self._free:
            old = self.tensor
            size = max(_LEAST_ROWS, 2 * len(old))
            self.tensor = torch.zeros(size, old.shape[1], dtype=old.dtype, device=old.device)
            self.tensor[: len(old)] = old
            self._free = list(range(len(old), size))
        return self._free.pop()

    def put(self, row: int) -> None:
        if row >= 0:
            self._free.append(row)


@dataclass
class SamplingState:
    """The options of the running requests that have any.

    Args:
        vocab_size: token ids are below it.
        device: where the pools live.
    """

    vocab_size: int
    device: torch.device
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _cached: tuple[list[int], SamplingRows] | None = None

    def __post_init__(self) -> None:
        self._bias = _Pool(self.vocab_size, torch.float32, self.device)
        self._counts = _Pool(self.vocab_size, torch.int32, self.device)

    def add(self, requests: list[NewRequest]) -> None:
        """Take over the options of requests, whose slots other requests had before."""
        for request in requests:
            old = self._slots.pop(request.slot, None)
            if old is not None:
                self._bias.put(old.bias_row)
                self._counts.put(old.counts_row)
            if old is not None or request.options is not None:
                self._cached = None
            if request.options is not None:
                self._slots[request.slot] = self._new_slot(request.options, request.num_prompt_tokens)

    def rows_of(self, slots: list[int], num_tokens: np.ndarray, masks: TokenMasks | None) -> SamplingRows | None:
        """Return the rows that ask for something, or None.

        Args:
            slots: those that tokens are sampled for, in the order of the logits.
            num_tokens: [num_slots]; tokens that each slot's sequence has, without the one to be sampled.
            masks: the host's; their rows are among these.
        """
        asking = [row for row, slot in enumerate(slots) if slot in self._slots]
        if not asking:
            return None
        key = [item for row in asking for item in (row, slots[row])]
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._make_rows(asking, [self._slots[slots[row]] for row in asking])
        found = self._cached[1]
        found.edits.forbidden = self._forbidden([slots[row] for row in asking], num_tokens)
        found.edits.bitmask = found.edits.bitmask_rows = None
        if masks is not None:
            index = {row: i for i, row in enumerate(masks.rows)}
            found.edits.bitmask = torch.from_numpy(masks.words).to(self.device, non_blocking=True)
            found.edits.bitmask_rows = self._tensor([index.get(row, -1) for row in asking], torch.int32)
        return found

    def count(self, rows: SamplingRows, token_ids: torch.Tensor) -> None:
        """Count the tokens that a step has sampled; token_ids: [num_samples], of all rows of the step."""
        counts_rows = rows.edits.counts_rows
        if rows.counted is not None and counts_rows is not None:
            tokens = token_ids[rows.rows[rows.counted]]
            self._counts.tensor[counts_rows[rows.counted].long(), tokens] += 2

    def _new_slot(self, options: SamplingOptions, num_prompt_tokens: int) -> _Slot:
        params, bias_row, counts_row = options.params, -1, -1
        if params.logit_bias or params.allowed_token_ids is not None or options.bad_token_ids:
            bias = np.full(self.vocab_size, 0.0 if params.allowed_token_ids is None else -np.inf, dtype=np.float32)
            bias[params.allowed_token_ids or []] = 0.0
            for token_id, value in (params.logit_bias or {}).items():
                bias[token_id] += value
            bias[list(options.bad_token_ids)] = -np.inf
            bias_row = self._bias.take()
            self._bias.tensor[bias_row] = torch.from_numpy(bias).to(self.device)
        if params.uses_penalties:
            tokens = np.asarray(options.token_ids)
            counts = 2 * np.bincount(tokens[num_prompt_tokens:], minlength=self.vocab_size)
            counts[tokens[:num_prompt_tokens]] += 1
            counts_row = self._counts.take()
            self._counts.tensor[counts_row] = torch.from_numpy(counts.astype(np.int32)).to(self.device)
        return _Slot(options, num_prompt_tokens, bias_row, counts_row)

    def _make_rows(self, rows: list[int], slots: list[_Slot]) -> SamplingRows:
        params = [slot.options.params for slot in slots]
        edits = LogitsEdits()
        if any(slot.bias_row >= 0 for slot in slots):
            edits.bias = self._bias.tensor
            edits.bias_rows = self._tensor([slot.bias_row for slot in slots], torch.int32)
        counted = [i for i, slot in enumerate(slots) if slot.counts_row >= 0]
        if counted:
            edits.counts = self._counts.tensor
            edits.counts_rows = self._tensor([slot.counts_row for slot in slots], torch.int32)
            penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
            edits.penalties = self._tensor(penalties, torch.float32)
        logprobs = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        return SamplingRows(
            rows=self._tensor(rows, torch.int64),
            edits=edits,
            cutoffs=self._make_cutoffs(slots),
            counted=self._tensor(counted, torch.int64) if counted else None,
            logprob_rows=[rows[i] for i in logprobs],
            logprobs=self._tensor(list(logprobs), torch.int64),
            num_logprobs=max(logprobs.values(), default=0),
        )

    def _make_cutoffs(self, slots: list[_Slot]) -> CutoffParams | None:
        params = [slot.options.params for slot in slots]
        if not any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
            return None
        return CutoffParams(
            temperatures=self._tensor([p.temperature for p in params], torch.float32),
            top_k=self._tensor([min(p.top_k, self.vocab_size) for p in params], torch.int32),
            top_p=self._tensor([p.top_p for p in params], torch.float32),
            min_p=self._tensor([p.min_p for p in params], torch.float32),
            max_top_k=min(max(p.top_k for p in params), self.vocab_size),
            any_nucleus=any(p.top_p < 1 and not p.top_k for p in params),
        )

    def _forbidden(self, slots: list[int], num_tokens: np.ndarray) -> torch.Tensor | None:
        """Return (row, token id) of the tokens that would end an output before its `min_tokens`, [2, n] int64."""
        pairs = [
            (row, token_id)
            for row, number in enumerate(slots)
            if (slot := self._slots[number]).options.end_token_ids
            and num_tokens[number] - slot.num_prompt_tokens < slot.options.params.min_tokens
            for token_id in slot.options.end_token_ids
        ]
        return self._tensor(list(zip(*pairs, strict=True)), torch.int64) if pairs else None

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
