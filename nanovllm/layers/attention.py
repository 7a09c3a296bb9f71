"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend, AttentionLayer
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import get_step_metadata
from nanovllm.kernels import ops
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.quantization.weight import DenseWeight, Weight
from nanovllm.weights.slices import LoadableVector

if TYPE_CHECKING:
    from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
    from nanovllm.quantization.fp8 import KVCacheScales


class CachedAttention(nn.Module):
    """A layer that attends over its share of the cache, as the runner sees it.

    Args:
        num_kv_heads: of this rank.
        key_size, value_size: elements of a head's key and of its value.
        scale, options: see `AttentionLayer`.
        scales: of a cache in e4m3, if the checkpoint has them.
        sinks: the score of each of this rank's heads for a key without a value, if the model has some; see
            `AttentionOptions`.

    Attributes:
        backend, layer: bound by the runner.
    """

    backend: AttentionBackend
    layer: AttentionLayer

    def __init__(
        self, num_kv_heads: int, key_size: int, value_size: int, scale: float, options: AttentionOptions,
        scales: KVCacheScales | None = None,
        *, sinks: LoadableVector | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_kv_heads, self.key_size, self.value_size = num_kv_heads, key_size, value_size
        self.scale, self.given_options, self.scales, self.sinks = scale, options, scales, sinks

    @property
    def options(self) -> AttentionOptions:
        """Options of the layer's attention, with its sinks once it is loaded."""
        return self.given_options if self.sinks is None else replace(self.given_options, sinks=self.sinks.values)

    def kv_cache_spec(self, dtype: torch.dtype) -> Paged:
        """Return the cache spec of the layer; dtype: of its keys and values."""
        return Paged(self.num_kv_heads, self.key_size, self.value_size, self.given_options.window, dtype)

    def bind(self, pages: KVPages, backend: AttentionBackend, group: int = 0) -> None:
        """Give the layer its cache, its backend and its group."""
        self.backend, self.layer = backend, AttentionLayer(pages, self.scale, self.options, group)

    def unbind(self) -> None:
        """Take from the layer what `bind` gave it."""
        del self.backend, self.layer


class Attention(CachedAttention):
    """Causal attention of one layer over its share of the cache.

    eps: of the norms of heads, if there are any; scale: of scores, None for `head_dim**-0.5`; has_gates: whether the
    queries have gates, see `NormRope`.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, eps: float, rotary: RotaryEmbedding, options: AttentionOptions = PLAIN,
        scales: KVCacheScales | None = None,
        *, scale: float | None = None, has_gates: bool = False, sinks: LoadableVector | None = None,
    ) -> None:  # fmt: skip
        scale = head_dim**-0.5 if scale is None else scale
        super().__init__(num_kv_heads, head_dim, head_dim, scale, options, scales, sinks=sinks)
        self.head_dim, self.eps, self.rotary, self.has_gates = head_dim, eps, rotary, has_gates

    def rope(self, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> NormRope:
        """Return what happens to heads before attention; q_norm, k_norm: of each head, None if the model has none."""
        norm_weights = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        return ops.NormRope(norm_weights, self.eps, self.rotary.cos_sin, self.has_gates)

    def should_project(self, weight: Weight, num_tokens: int, rope: NormRope) -> bool:
        """Return whether `project` supports this weight, and is faster than a product with `forward` after it."""
        if not isinstance(weight, DenseWeight) or weight.bias is not None or rope.norm_weights is None:
            return False
        if self.has_gates or self.layer.pages.scales is not None:
            return False
        return weight.policy.projects_qkv(num_tokens, weight.values, self.head_dim)

    def project(self, x: torch.Tensor, weight: Weight, rope: NormRope, positions: torch.Tensor) -> torch.Tensor:
        """Multiply x by the weight of queries, keys and values, and compute `qkv_rope_store` of it, in one kernel.

        x: [num_tokens, hidden_size]; only if `should_project`. Returns the queries, [num_tokens, num_heads, head_dim].
        """
        assert isinstance(weight, DenseWeight)
        slot_mapping, num_programs = self._slot_mapping, ops.device_limits(x.device)[0]
        pages = self.layer.pages
        return ops.persistent_qkv_rope_store(x, weight.values, rope, positions, pages, slot_mapping, num_programs)

    def store(self, x: torch.Tensor, weight: Weight, rope: NormRope, positions: torch.Tensor) -> None:
        """Compute and store keys and values alone; x, weight, rope, positions: see `project`."""
        size = 2 * self.num_kv_heads * self.head_dim
        if isinstance(weight, DenseWeight) and weight.bias is None:
            kv = ops.norm_linear(x, weight.values[-size:], policy=weight.policy)[0]
        else:
            kv = weight.multiply(x)[0][:, -size:]
        heads = kv.view(len(positions), -1, self.head_dim)
        ops.qkv_rope_store(heads, rope, positions, self.layer.pages, self._slot_mapping)

    @property
    def _slot_mapping(self) -> torch.Tensor:
        return get_step_metadata().slot_mappings[self.layer.group]

    def forward(
        self, qkv: torch.Tensor, rope: NormRope, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values, and attend over all that is stored.

        Args:
            qkv: [num_tokens, outputs of this rank]; queries (with their gates), keys and values of all tokens.
            rope: from the method `rope`.
            positions: [num_tokens].
            rows: see `attend`.
        """
        # [num_tokens, num_heads (twice with gates) + 2 * num_kv_heads, head_dim]
        heads = qkv.view(len(positions), -1, self.head_dim)
        if rows is None and self.layer.options.is_plain and not self.has_gates:
            out = self.backend.run_projected(heads, rope, self.layer, get_step_metadata())
            if out is not None:
                return out.flatten(1)
        query = ops.qkv_rope_store(heads, rope, positions, self.layer.pages, self._slot_mapping)
        attended = self.attend(query, rows)
        if not self.has_gates:
            return attended
        gates = heads if rows is None else heads[rows]
        return ops.gate_heads(attended.unflatten(1, query.shape[1:]), gates).flatten(1)

    def attend(self, query: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Attend over all that is stored, the step's tokens included.

        query: [num_tokens, num_heads, head_dim]; rows: the tokens to sample from, if only their outputs are wanted.
        Returns [num_tokens or len(rows), num_heads * head_dim].
        """
        step = get_step_metadata()
        # Tiles without a sampled row are not computed, and their rows have anything in them.
        out = self.backend.run(query, self.layer, step if rows is None else step.for_samples())
        return (out if rows is None else out[rows]).flatten(1)
