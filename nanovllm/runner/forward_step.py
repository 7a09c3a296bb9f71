"""A step under way on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.runner.batch import DeviceBatch, PreparedStep
from nanovllm.runner.messages import ScheduledBatch
from nanovllm.runner.output_buffers import ExtraOutputs
from nanovllm.sampling.rows import ExtraRows


@dataclass
class ForwardStep:
    """A step whose forward pass is queued.

    Attributes:
        batch, prepared: what the host has planned, and what of it is on the device.
        extra: what rows ask for beyond a temperature.
        inputs, logits: what is to be sampled; None if it was sampled with the forward pass.
        prompt_hidden: [num_prompt_tokens, hidden_size]; None unless chunks ask for it.
        extra_outputs: what was asked for besides tokens, once they are sampled.
    """

    batch: ScheduledBatch
    prepared: PreparedStep
    extra: ExtraRows | None = None
    inputs: DeviceBatch | None = None
    logits: torch.Tensor | None = None
    prompt_hidden: torch.Tensor | None = None
    extra_outputs: ExtraOutputs | None = None
