"""The interface of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.kernels.qkv_rope_store import NormWeights


class AttentionBackend(ABC):
    """Causal attention of one step's tokens over the paged KV cache, which already holds their keys and values."""

    supports_cuda_graph = True
    """Whether decode steps can be captured in a CUDA graph."""
    supports_mixed_graph = False
    """Whether steps with prompt chunks can be captured too; sizes and work lists must then be read on the device."""

    supports_single_split = False
    """Whether `should_use_single_split` can return true, so that decode steps are captured in both forms."""

    max_cascade_items = 0
    """Maximum items of cascade attention in one step, see `CascadeGroups`; 0 if the backend does not support it."""
    rows_per_cascade_item = 1
    """Maximum decode rows per cascade item."""

    def should_use_single_split(self, num_kv_heads: int, seq_lens: np.ndarray) -> bool:
        """Return whether a decode step over contexts of these lengths is faster with `AttentionMetadata.single_split`.

        Args:
            num_kv_heads: the smallest number of KV heads on any rank, so that all ranks decide alike.
            seq_lens: [num_seqs], may be empty; tokens of each context without its shared prefix.
        """
        return False

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Return what every layer's `forward` shares in this step; the caller stores it in `metadata.plan`."""
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
        """Return the attention outputs of all query rows.

        Args:
            query: [num_tokens, num_heads, head_dim]; decode rows first, then the prompt chunks' tokens.
            k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            metadata: describes the step.
            scale: factor of the scores before the softmax.

        Returns:
            [num_tokens, num_heads, head_dim], contiguous; padding rows and chunk rows that are in none of
            `metadata.query_tiles` are undefined.
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
        """Run `qkv_rope_store` and `forward` in one kernel; return None, without any effect, if that is unsupported."""
        return None
