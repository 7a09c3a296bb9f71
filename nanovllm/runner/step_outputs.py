"""The results of a step: outputs of prompt chunks besides a token, and copies to the host while the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.models.base import CausalLM
from nanovllm.runner.batch import DeviceStep
from nanovllm.runner.messages import Chunk, PromptScores, StepOutput, TokenLogprobs
from nanovllm.sampling.sampler import DeviceLogprobs, Sampler

LOGITS_BYTES = 2**28
"""Most bytes of a prompt's float32 logits at a time."""


def prompt_outputs(
    model: CausalLM, sampler: Sampler, chunks: list[Chunk], hidden: torch.Tensor
) -> list[DeviceLogprobs | torch.Tensor]:
    """Return the outputs of chunks with `scores` or `pooling`, in order; hidden: [num_prompt_tokens, hidden_size]."""
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
    starts = [0, *ends[:-1].tolist()]
    scored = [(start, chunk.scores) for start, chunk in zip(starts, chunks, strict=True) if chunk.scores]
    logprobs = iter(_score(model, sampler, hidden, scored))
    outputs: list[DeviceLogprobs | torch.Tensor] = []
    for start, chunk in zip(starts, chunks, strict=True):
        states = hidden[start : start + len(chunk.token_ids)]
        if chunk.scores is not None:
            outputs.append(next(logprobs))
        elif chunk.pooling is not None:
            outputs.append(states.sum(0, dtype=torch.float32) if chunk.pooling == "mean" else states[-1].float())
    return outputs


def scored_rows_at_once(vocab_size: int) -> int:
    """Return the number of prompt rows whose logits are computed at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def _score(
    model: CausalLM, sampler: Sampler, hidden: torch.Tensor, scored: list[tuple[int, PromptScores]]
) -> list[DeviceLogprobs]:
    """Compute the log-probabilities of all chunks, in slices of rows whose logits fit into `LOGITS_BYTES`.

    scored: each chunk's first row of the hidden states, and its request.
    """
    if not scored:
        return []
    indices = [range(start + scores.first, start + scores.first + len(scores.token_ids)) for start, scores in scored]
    rows = torch.tensor([index for part in indices for index in part]).to(hidden.device)
    targets = torch.tensor([token_id for _, scores in scored for token_id in scores.token_ids]).to(hidden.device)
    num_logprobs = max(scores.num_logprobs for _, scores in scored)
    size = scored_rows_at_once(sampler.vocab.total)
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


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; on the CPU return the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


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
        token_ids: `num_decodes` of rows of one token, padding up to `num_padded_decodes`, then tokens of chunks.
        logprob_rows: the rows of logits that `logprobs` describe.
        logprobs: None if there are no such rows.
        prompt_outputs: see `StepOutput`.
        num_clipped: [1], for a cache in e4m3; see `StepOutput`.
    """

    token_ids: torch.Tensor
    num_decodes: int
    num_padded_decodes: int
    copied: torch.cuda.Event | None
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: DeviceLogprobs | None = None
    prompt_outputs: list[DeviceLogprobs | torch.Tensor] = field(default_factory=list)
    num_clipped: torch.Tensor | None = None

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""
        if self.copied is not None:
            self.copied.synchronize()
        values = self.token_ids.numpy()
        num_padding = self.num_padded_decodes - self.num_decodes
        return StepOutput(
            # A copy, since the buffer is reused.
            np.concatenate((values[: self.num_decodes], values[self.num_padded_decodes :])),
            [row if row < self.num_decodes else row - num_padding for row in self.logprob_rows],
            None if self.logprobs is None else _numpy(self.logprobs),
            [item.numpy() if isinstance(item, torch.Tensor) else _numpy(item) for item in self.prompt_outputs],
            0 if self.num_clipped is None else int(self.num_clipped),
        )


class OutputBuffers:
    """Copies steps' outputs to the host.

    Two buffers alternate, so that two steps under way do not overwrite each other's outputs.

    Args:
        sampled: [n] int64, where every step stores its tokens.
    """

    def __init__(self, sampled: torch.Tensor) -> None:
        self._sampled = sampled
        self._buffers = [torch.empty_like(sampled, device="cpu", pin_memory=sampled.is_cuda) for _ in range(2)]
        self._turn = 0

    def copy(
        self,
        step: DeviceStep,
        logprobs: DeviceLogprobs | None,
        prompts: list[DeviceLogprobs | torch.Tensor],
        num_clipped: torch.Tensor | None,
    ) -> PendingStep:
        """Queue the copies of the results of the last queued step; see `PendingStep` for the arguments."""
        num_padded = step.shape.num_decodes
        sampled = self._sampled[: num_padded + sum(chunk.samples for chunk in step.batch.chunks)]
        if sampled.is_cuda:
            self._turn ^= 1
            buffer = self._buffers[self._turn][: len(sampled)]
            buffer.copy_(sampled, non_blocking=True)
        else:
            buffer = sampled.clone()
        pending = PendingStep(
            buffer,
            len(step.batch.rows),
            num_padded,
            None,
            [] if step.extra is None else step.extra.logprob_rows,
            None if logprobs is None else _copy(logprobs),
            [to_host(item) if isinstance(item, torch.Tensor) else _copy(item) for item in prompts],
            None if num_clipped is None else to_host(num_clipped),
        )
        if sampled.is_cuda:
            pending.copied = torch.cuda.Event()
            pending.copied.record()
        return pending
