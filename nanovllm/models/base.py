"""What the runner and the loader know of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import shard_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.rotary_embedding import cos_sin_table
from nanovllm.layers.weights import WeightTarget
from nanovllm.model_config import ModelConfig


class CausalLM(nn.Module):
    """One rank's shard of a model. Parameters are made on whatever device is the default, and filled by the loader.

    Args:
        config: the shape of the whole.
        communicator: says which rank this is, and connects it with the others.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]]
    """Projections of the checkpoint that are one here: name there -> (name here, part of its weight)."""

    model: nn.Module
    """Embedding, `layers` and the last norm."""
    lm_head: ParallelLMHead

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.shard = shard_of(config, communicator.rank, communicator.size)

    def init_rope(self, max_position: int, device: torch.device) -> None:
        """Tabulate the rotary embedding for positions below `max_position`."""
        config = self.config
        table = cos_sin_table(config.head_dim, max_position, config.rope_theta, config.yarn, device)
        for module in self.modules():
            if isinstance(module, Attention):
                module.cos_sin = table

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None) -> Normed:
        """token_ids, positions: [num_tokens] int32 -> the last norm, not computed yet, for `compute_logits`.

        It is of [num_tokens, hidden_size], or of `rows` of it: few tokens of a prompt have one sampled after them.
        """
        hidden: Normed = self.model(token_ids, positions, rows)
        return hidden

    def compute_logits(self, hidden: Normed) -> torch.Tensor:
        """hidden: of num_rows tokens, from `forward` -> [num_rows, vocabulary entries of this rank]."""
        logits: torch.Tensor = self.lm_head(hidden).compute()
        return logits

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], behind the last norm -> [num_rows, vocabulary entries of this rank]."""
        return self.lm_head.multiply(hidden)

    def weight_target(self, name: str) -> WeightTarget | None:
        """Map the name of a checkpoint tensor to its target, which may not exist; None for one that is not needed."""
        # A tied head is the embedding; many checkpoints store it all the same.
        if self.config.tie_word_embeddings and name == "lm_head.weight":
            return None
        path, part = name.split("."), None
        if len(path) >= 2 and path[-2] in self.packed_modules_mapping:
            path[-2], part = self.packed_modules_mapping[path[-2]]
        return WeightTarget(".".join(path), part)
