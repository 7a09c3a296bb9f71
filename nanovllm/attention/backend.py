"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from nanovllm.utils.context import Context


class AttentionBackend(ABC):
    """Causal attention of the rows of one step over the paged cache, which holds those rows' keys already."""

    supports_cuda_graph = True
    """Whether decode steps can be captured."""
    supports_mixed_graph = False
    """Whether steps with prompt tokens can: sizes and work lists then come from tensors on the device alone."""

    max_prefix_items = 0
    """Most pieces of work on shared prefixes in one step; 0 if it makes no use of them."""
    rows_per_prefix_item = 1
    """Most decode rows of such a piece."""

    def plan(self, context: Context) -> Any:
        """Prepare once a step what every layer's `forward` will want; lands in `context.plan`."""
        return None

    @abstractmethod
    def forward(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [num_tokens, num_heads, head_dim]; the decode rows, then the chunks'.
            k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            context: the step; rows beyond its sequences are padding and may come out as anything finite.
            scale: factor of the scores before the softmax.

        Returns:
            [num_tokens, num_heads, head_dim], contiguous.
        """
