"""Copies a step's results to the host while the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.runner.batch import DeviceStep
from nanovllm.runner.messages import StepOutput, TokenLogprobs
from nanovllm.sampling.sampler import DeviceLogprobs


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
