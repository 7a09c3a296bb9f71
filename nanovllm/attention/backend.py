"""The interface of an attention backend: a step is planned on the host, then on the device, and run layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import StepMetadata
from nanovllm.kernels import ops
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions

if TYPE_CHECKING:
    from nanovllm.kernels.policy import KernelPolicy
    from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class AttentionSetup:
    """The model and the device that a backend is made for.

    Attributes:
        device, dtype: of the queries.
        block_size: tokens per cache block.
        num_heads: query heads of a layer.
        specs: cache specs of the layers.
        num_slots: most decode rows.
        shares_prefixes: whether sequences share blocks of the prefix cache, so that cascade attention may pay.
        all_reduce_min: returns the least of all ranks' numbers, which call this together.
        policy: chooses the kernels.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int
    num_heads: int
    specs: Sequence[Paged]
    num_slots: int
    shares_prefixes: bool = False
    all_reduce_min: Callable[[int], int] = int
    policy: KernelPolicy = field(default_factory=lambda: ops.FASTEST)


class HostPlan(NamedTuple):
    """A step's plan on the host: steps of one variant and size launch the same kernels.

    `array`, [n] int32, is the content of `AttentionBackend.plan_buffer` that the step reads, empty if it reads none:
    the same object as before if it is unchanged.
    """

    variant: Hashable
    array: np.ndarray


@dataclass(frozen=True)
class CaptureVariant:
    """A variant of steps that are captured as CUDA graphs; `is_coarse` if few sizes of it are enough."""

    variant: Hashable
    is_coarse: bool = False


@dataclass(frozen=True)
class AttentionLayer:
    """One layer as a backend sees it.

    Attributes:
        pages: keys and values.
        scale: factor of the scores before the softmax.
        options: how it differs from plain causal attention.
        group: index of its group of the KV cache.
    """

    pages: KVPages
    scale: float
    options: AttentionOptions = PLAIN
    group: int = 0

    @cached_property
    def spec(self) -> Paged:
        """The cache spec of the pages."""
        num_kv_heads, key_size = self.pages.k_cache.shape[2:]
        value_size, dtype = self.pages.v_cache.shape[3], self.pages.k_cache.dtype
        return Paged(num_kv_heads, key_size, value_size, self.options.window, dtype)


class AttentionBackend(ABC):
    """Causal attention of one step's tokens over the paged KV cache, which already holds their keys and values.

    A step is planned twice: `plan_host` chooses its CUDA graph, from counts on the host; `plan` is captured in it.

    Attributes:
        supports_cuda_graph: whether decode steps can be captured in a CUDA graph.
        supports_mixed_graph: whether steps with prompt chunks can be captured too; sizes and work lists must then be
            read on the device.
        kernel_rows: numbers of decode rows at which the choice of attention kernels changes.
        plan_buffer: [n] int32, on the device; filled with `HostPlan.array`. Empty if the backend sends nothing.
    """

    supports_cuda_graph = True
    supports_mixed_graph = False
    kernel_rows: tuple[int, ...] = ()
    plan_buffer: torch.Tensor = torch.empty(0, dtype=torch.int32)

    def check(self, spec: Paged, options: AttentionOptions) -> None:
        """Raise a ValueError if layers that cache and attend like this are not supported."""
        return

    def variants(self) -> list[CaptureVariant]:
        """Return the variants of steps, ordered by memory, the least first."""
        return [CaptureVariant(None)]

    def plan_host(self, slots: np.ndarray, num_computed: np.ndarray, block_tables: np.ndarray) -> HostPlan:
        """Plan a step on the host, alike on all ranks.

        Args:
            slots: [num_decodes] int32; the decode rows' slots.
            num_computed: [num_slots]; tokens of each slot that are stored, without the step's own.
            block_tables: [num_slots, max_blocks] int32.
        """
        return HostPlan(None, NOTHING)

    @abstractmethod
    def plan(self, step: StepMetadata) -> None:
        """Set `StepMetadata.plan`: what `run` of all layers shares in this step.

        A CUDA graph may hold this: what differs between steps of one variant is read on the device.
        """

    @abstractmethod
    def run(self, query: torch.Tensor, layer: AttentionLayer, step: StepMetadata) -> torch.Tensor:
        """Return the attention outputs of all query rows, [num_tokens, num_heads, elements of a value], contiguous.

        Padding rows, tokens of decode rows that are not new, and chunk rows outside all `step.query_tiles` are
        undefined.

        Args:
            query: [num_tokens, num_heads, head_dim]; the decode rows' first, then the prompt chunks' tokens.
            layer, step: which layer attends in which step.
        """

    def run_projected(
        self, qkv: torch.Tensor, rope: NormRope, layer: AttentionLayer, step: StepMetadata
    ) -> torch.Tensor | None:
        """Run `qkv_rope_store` and `run` in one kernel; return None, without any effect, if that is unsupported.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim].
        """
        return None
