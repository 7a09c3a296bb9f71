"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), which takes attention's place.

A short convolution of inputs, keys and queries, the state space, and a gated norm. All parts of a layer are divided
among the ranks by groups of heads, which share keys and queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import State
from nanovllm.kernels.mixers.causal_conv import ConvState
from nanovllm.kernels.mixers.mamba2 import StateSpace, mamba2_prompt, mamba2_step
from nanovllm.kernels.mixers.state_pool import StatePool
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.short_conv import ConvFilters
from nanovllm.layers.state import StateLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import Float32Slice, LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig
    from nanovllm.kernels.mixers.state_rows import DraftedStateRows, StateRows, StateTiles

_HEAD_PARAMS = ("A_log", "dt_bias", "D")


class ShardedNorm(LoadableModule):
    """The weight of a norm over groups of this rank, [size of the shard]."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(torch.empty(shard.size), requires_grad=False)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {WeightTarget(f"{name}.weight"): WeightSlice.of((self.shard,), self.weight.data)}


class Mamba(StateLayer, LoadableModule):
    """The token mixer of one layer.

    Attributes:
        A_log, dt_bias, D: [heads of this rank] float32; see `StateSpace`. They have the names that they have in
            checkpoints.
        space: the layer as kernels take it, between `bind` and `unbind`.
    """

    space: StateSpace

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        assert config.mamba is not None and shard.mamba_groups is not None
        sizes, groups, quant_config = config.mamba, shard.mamba_groups, config.quantization
        self.sizes, self.groups, self.slice_size = sizes, groups, sizes.head_size & -sizes.head_size
        self.heads = groups.times(sizes.num_heads // sizes.num_groups)
        inner, keys = self.heads.times(sizes.head_size), groups.times(sizes.state_size)
        channels: dict[str | None, Shard] = {"x": inner, "b": keys, "c": keys}
        self.channels = inner.size + 2 * keys.size
        self.kept_size = self.channels + self.heads.size
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, {"z": inner, **channels, "dt": self.heads}, quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        self.conv1d = ConvFilters(channels, sizes.conv_width, sizes.has_conv_bias)
        self.A_log, self.dt_bias, self.D = (
            nn.Parameter(torch.empty(self.heads.size), requires_grad=False) for _ in _HEAD_PARAMS
        )
        self.norm = ShardedNorm(inner) if sizes.has_norm else None
        self.o_proj = RowParallelLinear(
            inner, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {
            WeightTarget(f"{name}.{param}"): Float32Slice.of((self.heads,), getattr(self, param).data)
            for param in _HEAD_PARAMS
        }

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        sizes = self.sizes
        return State({
            "recurrent": ((self.heads.size, sizes.state_size, sizes.head_size), torch.float32),
            "conv": ((sizes.conv_width + self.num_drafts, self.channels), dtype),
        })  # fmt: skip

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        sizes, filters = self.sizes, self.conv1d.weight.squeeze(1)
        self.space = StateSpace(
            num_heads=self.heads.size, head_size=sizes.head_size, num_groups=self.groups.size,
            state_size=sizes.state_size, conv_weight=filters, conv_bias=self.conv1d.bias, a_log=self.A_log,
            dt_bias=self.dt_bias, d=self.D, step_limits=sizes.step_limits,
            norm_weight=None if self.norm is None else self.norm.weight, eps=sizes.norm_eps,
            conv=ConvState(pool.view(filters.dtype), places["conv"], sizes.conv_width + self.num_drafts),
            pool=pool.view(torch.float32), first=places["recurrent"], kept=self.kept,
        )  # fmt: skip

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.space

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        projected, total = self.in_proj(x, norm, residual)
        return self.run([projected], partial(self._scan, mamba2_step), partial(self._scan, mamba2_prompt)), total

    def _scan(
        self, scan: Callable[..., torch.Tensor], projected: torch.Tensor,
        states: StateRows | DraftedStateRows | StateTiles,
    ) -> torch.Tensor:  # fmt: skip
        heads, size = self.heads.size, self.sizes.head_size
        z, channels, dt = projected.split([heads * size, self.channels, heads], 1)
        return scan(self.space, channels, dt, z, states)
