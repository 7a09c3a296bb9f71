"""Stores sampling parameters beyond the temperature, by slot.

Requests that need only a temperature have no entry, and steps of such requests do not use this module. Token counts
and biases are rows of pools on the device, which grow on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.config import LogprobsMode
from nanovllm.kernels.logits import CutoffParams, LogitsEdits
from nanovllm.sampling.sampler import ExtraRows
from nanovllm.sampling_params import SamplingExtra
from nanovllm.utils.device import to_device

_LEAST_ROWS = 8


@dataclass
class _Slot:
    """One slot's parameters and its rows in the pools; -1: no row."""

    extra: SamplingExtra
    bias_row: int
    counts_row: int

    @property
    def is_edited(self) -> bool:
        """Whether the slot needs more than log-probabilities."""
        params = self.extra.params
        plain = self.bias_row < 0 and self.counts_row < 0 and not self.extra.end_token_ids
        return not plain or self.extra.is_masked or bool(params.top_k or params.top_p < 1 or params.min_p)


def pool_rows(num_rows: int) -> int:
    """Return the size of a pool for a number of rows in use."""
    return max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())


class _Pool:
    """A pool of device rows, [vocab_size] each, allocated one at a time."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(0, vocab_size, dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        if not self._free:
            old = self.tensor
            size = pool_rows(len(old) + 1)
            self.tensor = torch.zeros(size, old.shape[1], dtype=old.dtype, device=old.device)
            self.tensor[: len(old)] = old
            self._free = list(range(len(old), size))
        return self._free.pop()

    def put(self, row: int) -> None:
        if row >= 0:
            self._free.append(row)


class SamplingState:
    """Stores the parameters of running requests beyond the temperature; see `Sampler` for the mode."""

    def __init__(self, vocab_size: int, device: torch.device, logprobs_mode: LogprobsMode) -> None:
        self.vocab_size, self.device, self.logprobs_mode = vocab_size, device, logprobs_mode
        self._slots: dict[int, _Slot] = {}
        # Rows and slots of a step, with the resulting parameters: usually the same in the next step.
        self._cached: tuple[list[int], ExtraRows] | None = None
        self._bias = _Pool(vocab_size, torch.float32, device)
        self._counts = _Pool(vocab_size, torch.int32, device)

    def add(self, slot: int, extra: SamplingExtra | None) -> None:
        """Store the parameters of a new request in a slot, and free the previous request's rows."""
        old = self._slots.pop(slot, None)
        if old is not None:
            self._bias.put(old.bias_row)
            self._counts.put(old.counts_row)
        if old is not None or extra is not None:
            self._cached = None
        if extra is not None:
            self._slots[slot] = self._new_slot(extra)

    def rows_of(self, slots: list[int], num_tokens: np.ndarray) -> ExtraRows | None:
        """Return the parameters of a step's rows, without the host's masks; None if no row has any.

        slots: of the sampled tokens, in the order of the logits; num_tokens: [num_slots], without the token to sample.
        """
        with_extra = [row for row, slot in enumerate(slots) if slot in self._slots]
        if not with_extra:
            return None
        key = [item for row in with_extra for item in (row, slots[row])]
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._make_rows({row: self._slots[slots[row]] for row in with_extra})
        found = self._cached[1]
        found.edits.forbidden = self._forbidden([slots[row] for row in found.edited], num_tokens)
        found.edits.bitmask = found.edits.bitmask_rows = None
        return found

    def add_masks(self, extra: ExtraRows, masked: list[int], masks: np.ndarray) -> None:
        """Add the host's masks of some rows of the logits to the result of `rows_of`; see `Runner.sample`."""
        index = {row: i for i, row in enumerate(masked)}
        extra.edits.bitmask = to_device(torch.from_numpy(masks), self.device)
        extra.edits.bitmask_rows = self._tensor([index.get(row, -1) for row in extra.edited], torch.int32)

    def count(self, extra: ExtraRows, token_ids: torch.Tensor) -> None:
        """Count a step's sampled tokens; token_ids: [num_samples], of all rows of the step."""
        counts_rows = extra.edits.counts_rows
        if extra.counted is not None and counts_rows is not None and extra.edited_indices is not None:
            tokens = token_ids[extra.edited_indices[extra.counted]]
            self._counts.tensor[counts_rows[extra.counted].long(), tokens] += 2

    def _new_slot(self, extra: SamplingExtra) -> _Slot:
        params, bias_row, counts_row = extra.params, -1, -1
        if params.logit_bias or params.allowed_token_ids is not None or extra.bad_token_ids:
            bias = np.full(self.vocab_size, 0.0 if params.allowed_token_ids is None else -np.inf, dtype=np.float32)
            bias[params.allowed_token_ids or []] = 0.0
            for token_id, value in (params.logit_bias or {}).items():
                bias[token_id] += value
            bias[list(extra.bad_token_ids)] = -np.inf
            bias_row = self._bias.take()
            self._bias.tensor[bias_row] = torch.from_numpy(bias).to(self.device)
        if params.uses_penalties:
            tokens = np.asarray(extra.token_ids)
            counts = 2 * np.bincount(tokens[extra.num_prompt_tokens :], minlength=self.vocab_size)
            counts[tokens[: extra.num_prompt_tokens]] += 1
            counts_row = self._counts.take()
            self._counts.tensor[counts_row] = torch.from_numpy(counts.astype(np.int32)).to(self.device)
        return _Slot(extra, bias_row, counts_row)

    def _make_rows(self, with_extra: dict[int, _Slot]) -> ExtraRows:
        logprobs = {row: p for row, slot in with_extra.items() if (p := slot.extra.params.logprobs) is not None}
        edits_all = self.logprobs_mode != "raw_logprobs"
        edited = [row for row, slot in with_extra.items() if edits_all or slot.is_edited]
        slots = [with_extra[row] for row in edited]
        edits = LogitsEdits()
        if any(slot.bias_row >= 0 for slot in slots):
            edits.bias = self._bias.tensor
            edits.bias_rows = self._tensor([slot.bias_row for slot in slots], torch.int32)
        counted = [i for i, slot in enumerate(slots) if slot.counts_row >= 0]
        if counted:
            edits.counts = self._counts.tensor
            edits.counts_rows = self._tensor([slot.counts_row for slot in slots], torch.int32)
            params = [slot.extra.params for slot in slots]
            penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
            edits.penalties = self._tensor(penalties, torch.float32)
        places = {row: i for i, row in enumerate(edited)}
        edited_logprobs = [places.get(row) for row in logprobs]
        num_logprobs = max(logprobs.values(), default=0)
        return ExtraRows(
            edited=edited,
            edited_indices=self._tensor(edited, torch.int64) if edited else None,
            edits=edits,
            cutoffs=self._make_cutoffs(slots),
            counted=self._tensor(counted, torch.int64) if counted else None,
            logprob_rows=list(logprobs),
            logprob_indices=self._tensor(list(logprobs), torch.int64) if logprobs else None,
            logprobs_in_edited=self._tensor(edited_logprobs, torch.int64) if None not in edited_logprobs else None,
            num_logprobs=num_logprobs,
            only_own_logprobs=not num_logprobs and not any(slot.is_edited for slot in with_extra.values()),
        )

    def _make_cutoffs(self, slots: list[_Slot]) -> CutoffParams | None:
        params = [slot.extra.params for slot in slots]
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
        """Return (row, token id) pairs of end tokens forbidden before `min_tokens`, [2, n] int64."""
        pairs = [
            (row, token_id)
            for row, number in enumerate(slots)
            if (extra := self._slots[number].extra).end_token_ids
            and num_tokens[number] - extra.num_prompt_tokens < extra.params.min_tokens
            for token_id in extra.end_token_ids
        ]
        return self._tensor(list(zip(*pairs, strict=True)), torch.int64) if pairs else None

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)
