"""A step's tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.runner.messages import StepOutput


@dataclass
class StepHandle:
    """A step under way.

    Attributes:
        token_ids: on the host once `copied` has happened, or at once if that is None; `num_decodes` decoded ones,
            padding up to `num_padded_decodes`, then those of the prompts that ended.
    """

    token_ids: torch.Tensor
    num_decodes: int
    num_padded_decodes: int
    copied: torch.cuda.Event | None

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens."""
        if self.copied is not None:
            self.copied.synchronize()
        token_ids = self.token_ids.tolist()
        return StepOutput(token_ids[: self.num_decodes] + token_ids[self.num_padded_decodes :])


class StepResults:
    """Copies a step's tokens to the host.

    Two buffers take turns: of the two steps that can be under way, neither overwrites the other's.

    Args:
        sampled: [n] int64, where every step leaves its tokens.
    """

    def __init__(self, sampled: torch.Tensor) -> None:
        self._sampled = sampled
        self._buffers = [torch.empty_like(sampled, device="cpu", pin_memory=sampled.is_cuda) for _ in range(2)]
        self._turn = 0

    def copy(self, num_decodes: int, num_padded_decodes: int, num_prompts: int) -> StepHandle:
        """Queue the copy of the step queued last, which samples for so many decode rows and ended prompts."""
        sampled = self._sampled[: num_padded_decodes + num_prompts]
        if not sampled.is_cuda:
            return StepHandle(sampled.clone(), num_decodes, num_padded_decodes, None)
        self._turn ^= 1
        result = self._buffers[self._turn][: len(sampled)]
        result.copy_(sampled, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepHandle(result, num_decodes, num_padded_decodes, copied)
