"""The interface of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from nanovllm.attention.host_plan import NOTHING, CaptureVariant, DecodeContexts, HostPlan
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.kernels.attention.head_outputs import HeadOutputs
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions
from nanovllm.kernels.linear.quantize_rows import Rounding
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope


class AttentionBackend(ABC):
    """Causal attention of one step's tokens over the paged KV cache, which already holds their keys and values."""

    supports_cuda_graph = True
    """Whether decode steps can be captured in a CUDA graph."""
    supports_mixed_graph = False
    """Whether steps with prompt chunks can be captured too; sizes and work lists must then be read on the device."""

    max_plan_size = 0
    """The most elements of `HostPlan.array`."""
    kernel_rows: tuple[int, ...] = ()
    """Numbers of decode rows at which the choice of attention kernels changes."""

    def variants(self) -> list[CaptureVariant]:
        """Return the variants of steps, those that take less memory first."""
        return [CaptureVariant(None)]

    def check(self, spec: Paged, options: AttentionOptions) -> None:
        """Raise a ValueError if layers that cache and attend like this are not supported."""
        return

    def take_groups(self, groups: Sequence[Sequence[Paged]]) -> None:
        """Take in what the layers of each group of the KV cache store, on which plans depend."""
        return

    def plan_host(self, contexts: DecodeContexts) -> HostPlan:
        """Plan a step on the host, alike on all ranks; contexts may be empty."""
        return HostPlan(None, NOTHING)

    def receive(self, array: torch.Tensor) -> None:
        """Take in the array that `plan_host` returned, once it is on the device."""
        return

    def plan(self, groups: Sequence[AttentionMetadata]) -> None:
        """Set each group's `AttentionMetadata.plan`: what `forward` of its layers shares in this step.

        A CUDA graph may hold this: what differs between steps of one variant is read on the device.
        """
        return

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        pages: KVPages,
        out: HeadOutputs,
        metadata: AttentionMetadata,
        scale: float,
        options: AttentionOptions,
    ) -> None:
        """Compute the attention outputs of all query rows.

        Args:
            query: [num_tokens, num_heads, head_dim]; decode rows first, then the prompt chunks' tokens.
            pages: the layer's keys and values.
            out: filled; in e4m3 only if `can_round`. Padding rows and chunk rows that are in none of
                `metadata.query_tiles` are undefined.
            metadata: describes the step.
            scale: factor of the scores before the softmax.
            options: of the layer.
        """

    def can_round(self, rounding: Rounding, value_size: int) -> bool:
        """Return whether outputs of heads of this size may be in e4m3, rounded so."""
        return False

    def forward(
        self,
        query: torch.Tensor,
        pages: KVPages,
        metadata: AttentionMetadata,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Return the outputs of `attend`, [num_tokens, num_heads, elements of a value], contiguous."""
        out = query.new_empty(*query.shape[:2], pages.v_cache.shape[3])
        self.attend(query, pages, out, metadata, scale, options)
        return out

    def forward_projected(
        self,
        qkv: torch.Tensor,
        rope: NormRope,
        pages: KVPages,
        metadata: AttentionMetadata,
        scale: float,
        rounding: Rounding | None,
    ) -> HeadOutputs | None:
        """Run `qkv_rope_store` and `forward` in one kernel; return None, without any effect, if that is unsupported.

        rounding: how the product that follows takes its rows in e4m3, if it does; outputs may be rounded so.
        """
        return None
