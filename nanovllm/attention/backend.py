"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.kernels.qkv_rope_store import NormWeights


class AttentionBackend(ABC):
    """Causal attention of the rows of one step over the paged cache, which holds those rows' keys already."""

    supports_cuda_graph = True
    """Whether decode steps can be captured."""
    supports_mixed_graph = False
    """Whether steps with prompt tokens can: sizes and work lists then come from tensors on the device alone."""

    supports_single_split = False
    """Whether there are steps that it had better run with `AttentionMetadata.single_split`."""

    max_cascade_items = 0
    """Most items of cascade attention in one step, see `CascadeGroups`; 0 if the backend has none."""
    rows_per_cascade_item = 1
    """Most decode rows of such an item."""

    def should_use_single_split(self, num_kv_heads: int, seq_lens: np.ndarray) -> bool:
        """Whether that pays in a step whose decode rows have contexts of these lengths, without what they share.

        seq_lens: [num_seqs], perhaps of none. num_kv_heads is some rank's: all ranks are asked the same, and so go
        the same way.
        """
        return False

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Prepare once a step what every layer's `forward` will want; lands in `metadata.plan`."""
        return None

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [num_tokens, num_heads, head_dim]; the decode rows, then the chunks'.
            k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            metadata: the step; rows beyond its sequences are padding, and they, as those in none of its tiles of
                queries, may come out as anything.
            scale: factor of the scores before the softmax.

        Returns:
            [num_tokens, num_heads, head_dim], contiguous.
        """

    def forward_projected(
        self,
        qkv: torch.Tensor,
        norm_weights: NormWeights | None,
        eps: float,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor | None:
        """`qkv_rope_store` and `forward` at once; None, and nothing done, where there is no such form of the step."""
        return None
