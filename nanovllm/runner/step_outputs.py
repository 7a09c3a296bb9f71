"""The results of a step: outputs of prompt chunks besides a token, and copies to the host while the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.models.base import CausalLM
from nanovllm.runner.batch import DeviceStep, StepShape
from nanovllm.runner.messages import Chunk, PromptScores, StepOutput, TokenLogprobs
from nanovllm.sampling.sampler import DeviceLogprobs, Sampler
from nanovllm.utils.device import to_device, to_host

LOGITS_BYTES = 2**28
"""Most bytes of a prompt's float32 logits at a time."""


def prompt_outputs(
    model: CausalLM, sampler: Sampler, chunks: list[Chunk], prompt_states: dict[int, torch.Tensor]
) -> list[DeviceLogprobs | torch.Tensor]:
    """Return the outputs that chunks ask for, in order; prompt_states: see `Unsampled`."""
    # After the last norm.
    hidden = prompt_states[max(prompt_states)]
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
    starts = [0, *ends[:-1].tolist()]
    scored = [(start, chunk.scores) for start, chunk in zip(starts, chunks, strict=True) if chunk.scores]
    logprobs = iter(_score(model, sampler, hidden, scored))
    outputs: list[DeviceLogprobs | torch.Tensor] = []
    for start, chunk in zip(starts, chunks, strict=True):
        part = slice(start, start + len(chunk.token_ids))
        if chunk.scores is not None:
            outputs.append(next(logprobs))
        if chunk.pooling is not None:
            states = hidden[part]
            outputs.append(states.sum(0, dtype=torch.float32) if chunk.pooling == "mean" else states[-1].float())
        if chunk.hidden_states:
            outputs.append(_layers_to_host([prompt_states[number][part] for number in chunk.hidden_states]))
    return outputs


def _layers_to_host(states: list[torch.Tensor]) -> torch.Tensor:
    """Queue copies of layers' states, [num_tokens, hidden_size] each, to the host; return them as one in float32."""
    host = torch.empty(len(states), *states[0].shape, dtype=torch.float32, pin_memory=states[0].is_cuda)
    # The device has no room for float32 states of many layers at once.
    for layer, tensor in zip(host, states, strict=True):
        layer.copy_(tensor, non_blocking=True)
    return host


def _score(
    model: CausalLM, sampler: Sampler, hidden: torch.Tensor, scored: list[tuple[int, PromptScores]]
) -> list[DeviceLogprobs]:
    """Compute the log-probabilities of all chunks (with their first rows), in slices of at most `LOGITS_BYTES`."""
    if not scored:
        return []
    indices = [range(start + scores.first, start + scores.first + len(scores.token_ids)) for start, scores in scored]
    rows = to_device(torch.tensor([index for part in indices for index in part]), hidden.device)
    targets = to_device(torch.tensor([token for _, scores in scored for token in scores.token_ids]), hidden.device)
    num_logprobs = max(scores.num_logprobs for _, scores in scored)
    size = max(1, LOGITS_BYTES // (4 * sampler.vocab.total))
    found = [
        sampler.score(model.project_logits(hidden[part]), part_targets, num_logprobs)
        for part, part_targets in zip(rows.split(size), targets.split(size), strict=True)
    ]
    sizes = [len(part) for part in indices]
    values, token_ids, ranks = (torch.cat(parts).split(sizes) for parts in zip(*found, strict=True))
    return [
        (v[:, : 1 + scores.num_logprobs], t[:, : 1 + scores.num_logprobs], r)
        for v, t, r, (_, scores) in zip(values, token_ids, ranks, scored, strict=True)
    ]


def _copy(tensors: DeviceLogprobs) -> DeviceLogprobs:
    values, token_ids, ranks = tensors
    return to_host(values), to_host(token_ids), to_host(ranks)


def _numpy(tensors: DeviceLogprobs) -> TokenLogprobs:
    values, token_ids, ranks = tensors
    return TokenLogprobs(values.numpy(), token_ids.numpy(), ranks.numpy())


@dataclass
class PendingStep:
    """A step under way, whose results are copied to the host; complete at once if `copied` is None, else after it.

    Attributes:
        shape, num_rows, num_samples: of the step, its decode rows without padding, and the chunks that it samples.
        sampled: a token for each row of logits; with drafts the number of tokens that each decode row gained; if the
            step makes drafts, the number of the next drafts of each row.
        logprob_rows: the rows of logits that `logprobs` describe.
        logprobs: None if there are no such rows.
        prompt_outputs: see `StepOutput`.
        num_clipped: [1], for a cache in e4m3; see `StepOutput`.
    """

    shape: StepShape
    num_rows: int
    num_samples: int
    sampled: torch.Tensor
    copied: torch.cuda.Event | None
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: DeviceLogprobs | None = None
    prompt_outputs: list[DeviceLogprobs | torch.Tensor] = field(default_factory=list)
    num_clipped: torch.Tensor | None = None

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""
        if self.copied is not None:
            self.copied.synchronize()
        values, shape, rows = self.sampled.numpy(), self.shape, self.num_rows
        logprobs = None if self.logprobs is None else _numpy(self.logprobs)
        offsets, ready = None, values[shape.num_logits :]
        if shape.num_drafts:
            counts, ready = ready[:rows], ready[shape.num_decodes :]
            offsets = np.concatenate(([0], counts, np.ones(self.num_samples, np.int64))).cumsum()
            gained = (np.arange(1 + shape.num_drafts) < counts[:, None]).reshape(-1)
            padding = np.zeros(shape.num_row_tokens - len(gained), dtype=bool)
            is_taken = np.concatenate((gained, padding, np.ones(self.num_samples, dtype=bool)))
            described = [i for i, row in enumerate(self.logprob_rows) if is_taken[row]]
            places = is_taken.cumsum() - 1
            logprob_rows = [int(places[self.logprob_rows[i]]) for i in described]
            if logprobs is not None:
                logprobs = TokenLogprobs(*(part[described] for part in vars(logprobs).values()))
            token_ids = values[: len(is_taken)][is_taken]
        else:
            # A copy, since the buffer is reused.
            token_ids = self._without_padding(values)
            num_padding = shape.num_decodes - rows
            logprob_rows = [row if row < rows else row - num_padding for row in self.logprob_rows]
        prompts = [item.numpy() if isinstance(item, torch.Tensor) else _numpy(item) for item in self.prompt_outputs]
        return StepOutput(
            token_ids, logprob_rows, logprobs, prompts, 0 if self.num_clipped is None else int(self.num_clipped),
            offsets, self._without_padding(ready) if len(ready) else None,
        )  # fmt: skip

    def _without_padding(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of the values of decode rows, one each, and of the chunks that are sampled."""
        first = self.shape.num_decodes
        return np.concatenate((values[: self.num_rows], values[first : first + self.num_samples]))


class OutputBuffers:
    """Copies steps' tokens, [n] int64, to two buffers on the host in turn, since two steps may be under way."""

    def __init__(self, sampled: torch.Tensor) -> None:
        self._sampled = sampled
        self._buffers = [torch.empty_like(sampled, device="cpu", pin_memory=sampled.is_cuda) for _ in range(2)]
        self._turn = 0

    def copy(
        self, step: DeviceStep, logprobs: DeviceLogprobs | None, prompts: list[DeviceLogprobs | torch.Tensor],
        num_clipped: torch.Tensor | None,
    ) -> PendingStep:  # fmt: skip
        """Queue the copies of the results of the last queued step; see `PendingStep` for the arguments."""
        shape, num_samples = step.shape, sum(chunk.samples for chunk in step.batch.chunks)
        num_counts = shape.num_decodes if shape.num_drafts else 0
        num_counts += shape.num_decodes + shape.num_chunks if shape.drafts else 0
        sampled = self._sampled[: shape.num_logits + num_counts]
        if sampled.is_cuda:
            self._turn ^= 1
            buffer = self._buffers[self._turn][: len(sampled)]
            buffer.copy_(sampled, non_blocking=True)
        else:
            buffer = sampled.clone()
        pending = PendingStep(
            shape, len(step.batch.rows), num_samples, buffer, None,
            [] if step.extra is None else step.extra.logprob_rows, None if logprobs is None else _copy(logprobs),
            [to_host(item) if isinstance(item, torch.Tensor) else _copy(item) for item in prompts],
            None if num_clipped is None else to_host(num_clipped),
        )  # fmt: skip
        if sampled.is_cuda:
            pending.copied = torch.cuda.Event()
            pending.copied.record()
        return pending
