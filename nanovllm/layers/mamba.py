"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), which takes attention's place.

A short convolution of inputs, keys and queries, the state space, and a gated norm. All parts of a layer are divided
among the ranks by groups of heads, which share keys and queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from nanovllm.kernels.mixers.mamba2 import StateSpace
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.short_conv import ConvFilters, RecurrentLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig


class ShardedNorm(LoadableModule):
    """The weight of a norm over groups of this rank, [size of the shard]."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(torch.empty(shard.size), requires_grad=False)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {WeightTarget(f"{name}.weight"): WeightSlice.of((self.shard,), self.weight.data)}


class Mamba(RecurrentLayer):
    """The token mixer of one layer."""

    HEAD_PARAMS = ("A_log", "dt_bias", "D")

    D: nn.Parameter

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        assert config.mamba is not None and shard.mamba_groups is not None
        sizes, groups, quant_config = config.mamba, shard.mamba_groups, config.quantization
        self.sizes, self.groups, self.slice_size = sizes, groups, sizes.head_size & -sizes.head_size
        self.heads = groups.times(sizes.num_heads // sizes.num_groups)
        inner, keys = self.heads.times(sizes.head_size), groups.times(sizes.state_size)
        channels: dict[str | None, Shard] = {"x": inner, "b": keys, "c": keys}
        self.state_shape = self.heads.size, sizes.state_size, sizes.head_size
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, {"z": inner, **channels, "dt": self.heads}, quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        self.conv1d = ConvFilters(channels, sizes.conv_width, sizes.has_conv_bias)
        self.kept_size = self.conv1d.channels + self.heads.size
        self.make_head_params()
        self.norm = ShardedNorm(inner) if sizes.has_norm else None
        self.o_proj = RowParallelLinear(
            inner, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def make_recurrence(self, common: Mapping[str, Any]) -> StateSpace:
        norm_weight = None if self.norm is None else self.norm.weight
        return StateSpace(
            num_groups=self.groups.size, d=self.D, step_limits=self.sizes.step_limits, norm_weight=norm_weight,
            eps=self.sizes.norm_eps, **common,
        )  # fmt: skip

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        projected, total = self.in_proj(x, norm, residual)
        heads, size = self.heads.size, self.sizes.head_size
        z, channels, dt = projected.split([heads * size, self.conv1d.channels, heads], 1)
        return self.run((channels, dt, z), self.recurrence.step, self.recurrence.prompt), total
