"""Token embedding and LM head, split over the ranks along the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.parallel.shard import Shard
from nanovllm.quantization import make_weight
from nanovllm.quantization.weight import DenseWeight, MatrixShard

if TYPE_CHECKING:
    from nanovllm.configs.quantization import QuantizationConfig


class VocabParallelEmbedding(nn.Module):
    """A table of one row a token."""

    def __init__(self, vocab: Shard, hidden_size: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = DenseWeight(MatrixShard({None: vocab}, Shard.whole(hidden_size)))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size], this rank's part of a sum: zeros for others' tokens."""
        if self.vocab.is_whole:
            return self.weight.embed(token_ids)
        rows = token_ids - self.vocab.start
        absent = (rows < 0) | (rows >= self.vocab.size)
        return self.weight.embed(rows.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(1), 0)


class ParallelLMHead(ColumnParallelLinear):
    """The projection to the logits of this rank's vocabulary entries, with the weight of the embedding `tied_to` it.

    Only a checkpoint that says so has its head in e4m3.
    """

    def __init__(
        self, vocab: Shard, hidden_size: int, tied_to: VocabParallelEmbedding | None,
        quant_config: QuantizationConfig | None = None,
    ) -> None:  # fmt: skip
        if tied_to is not None:
            super().__init__(tied_to.weight)
            return
        own_config = quant_config if quant_config is not None and quant_config.has_head else None
        super().__init__(make_weight(own_config, "lm_head", MatrixShard({None: vocab}, Shard.whole(hidden_size))))
