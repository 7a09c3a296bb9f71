"""Copies a step's results to the host while the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.runner.messages import StepOutput, TokenLogprobs
from nanovllm.sampling.sampler import DeviceLogprobs


@dataclass(frozen=True)
class ExtraOutputs:
    """What a step was asked for besides tokens, on the device or on the host.

    Attributes:
        rows: the rows of logits that `sampled` are of.
        sampled: None if there are no such rows.
        prompts: see `StepOutput.prompt_outputs`.
    """

    rows: list[int] = field(default_factory=list)
    sampled: DeviceLogprobs | None = None
    prompts: list[DeviceLogprobs | torch.Tensor] = field(default_factory=list)

    def to_host(self) -> ExtraOutputs:
        """Queue the copies of all tensors."""
        sampled = None if self.sampled is None else _copy(self.sampled)
        prompts = [to_host(item) if isinstance(item, torch.Tensor) else _copy(item) for item in self.prompts]
        return ExtraOutputs(self.rows, sampled, prompts)


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
class DeviceHandle:
    """A step under way on this device.

    Attributes:
        token_ids: on the host once `copied` has happened, or at once if that is None; `num_decodes` decoded ones,
            padding up to `num_padded_decodes`, then those of the prompts that ended.
        extra: what else the step was asked for, likewise; None for nothing.
        num_clipped: [1], likewise, of a cache in e4m3; see `StepOutput`.
    """

    token_ids: torch.Tensor
    num_decodes: int
    num_padded_decodes: int
    copied: torch.cuda.Event | None
    extra: ExtraOutputs | None = None
    num_clipped: torch.Tensor | None = None

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""
        if self.copied is not None:
            self.copied.synchronize()
        values = self.token_ids.numpy()
        # A copy, since the buffer is used again.
        token_ids = np.concatenate((values[: self.num_decodes], values[self.num_padded_decodes :]))
        num_clipped = 0 if self.num_clipped is None else int(self.num_clipped)
        if self.extra is None:
            return StepOutput(token_ids, num_clipped_kv=num_clipped)
        num_padding = self.num_padded_decodes - self.num_decodes
        rows = [row if row < self.num_decodes else row - num_padding for row in self.extra.rows]
        sampled = None if self.extra.sampled is None else _numpy(self.extra.sampled)
        prompts = [item.numpy() if isinstance(item, torch.Tensor) else _numpy(item) for item in self.extra.prompts]
        return StepOutput(token_ids, rows, sampled, prompts, num_clipped)


class OutputBuffers:
    """Copies steps' outputs to the host.

    Two buffers take turns: of the two steps that can be under way, neither overwrites the other's.

    Args:
        sampled: [n] int64, where every step leaves its tokens.
    """

    def __init__(self, sampled: torch.Tensor) -> None:
        self._sampled = sampled
        self._buffers = [torch.empty_like(sampled, device="cpu", pin_memory=sampled.is_cuda) for _ in range(2)]
        self._turn = 0

    def copy(
        self,
        num_decodes: int,
        num_padded_decodes: int,
        num_prompts: int,
        extra: ExtraOutputs | None = None,
        num_clipped: torch.Tensor | None = None,
    ) -> DeviceHandle:
        """Queue the copy of the step queued last, which samples for so many decode rows and ended prompts."""
        sampled = self._sampled[: num_padded_decodes + num_prompts]
        if not sampled.is_cuda:
            return DeviceHandle(sampled.clone(), num_decodes, num_padded_decodes, None, extra, num_clipped)
        self._turn ^= 1
        result = self._buffers[self._turn][: len(sampled)]
        result.copy_(sampled, non_blocking=True)
        on_host = None if extra is None else extra.to_host()
        clipped_on_host = None if num_clipped is None else to_host(num_clipped)
        copied = torch.cuda.Event()
        copied.record()
        return DeviceHandle(result, num_decodes, num_padded_decodes, copied, on_host, clipped_on_host)
