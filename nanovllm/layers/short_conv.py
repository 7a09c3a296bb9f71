"""The gated short convolution of LFM2, which takes attention's place; its channels are divided among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import State
from nanovllm.kernels.mixers.causal_conv import (
    ConvState,
    causal_conv,
    causal_conv_drafts,
    causal_conv_step,
    store_rings,
)
from nanovllm.kernels.mixers.state_pool import StatePool
from nanovllm.kernels.mixers.state_rows import DraftedStateRows, StateRows, StateTiles
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.state import StateLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import MatrixShard, Stream
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig


class ConvFilters(LoadableModule):
    """The filters of a convolution of each channel: weight, [channels of this rank, 1, width], and maybe a bias."""

    def __init__(self, parts: Mapping[str | None, Shard], width: int, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = MatrixShard(parts, Shard.whole(width))
        channels = self.shard.size[0]
        self.weight = nn.Parameter(torch.empty(channels, 1, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if has_bias else None

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        slices = {
            WeightTarget(f"{name}.weight", part): WeightSlice.of((channels, Shard.whole(1), self.shard.inputs), region)
            for part, channels, region in self.shard.split(self.weight.data)
        }
        if self.bias is not None:
            for part, channels, region in self.shard.split(self.bias.data):
                slices[WeightTarget(f"{name}.bias", part)] = WeightSlice.of((channels,), region)
        return slices


class ShortConv(StateLayer):
    """The token mixer of one layer: `o_proj(c * conv(b * x))`, where b, c and x are projections of its input.

    Attributes:
        conv: where inputs of the convolution are kept, between `bind` and `unbind`.
    """

    conv: ConvState

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        assert config.short_conv_width is not None and shard.channels is not None
        quant_config, channels = config.quantization, shard.channels
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, dict.fromkeys(("b", "c", "x"), channels), quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        self.conv1d = ConvFilters({None: channels}, config.short_conv_width)
        self.o_proj = RowParallelLinear(
            channels, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        channels, width = self.conv1d.shard.size
        return State({"conv": ((width + self.num_drafts, channels), dtype)})

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        ring = self.conv1d.shard.size[1] + self.num_drafts
        self.conv = ConvState(pool.view(self.conv1d.weight.dtype), places["conv"], ring)

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.conv

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        projected, total = self.in_proj(x, norm, residual)
        b, c, inner = projected.chunk(3, 1)
        gated = b * inner
        return c * self.run([gated], self._step, self._prompt), total

    def _step(self, x: torch.Tensor, states: StateRows | DraftedStateRows) -> torch.Tensor:
        weight = self.conv1d.weight.squeeze(1)
        if isinstance(states, StateRows):
            return causal_conv_step(x, weight, None, self.conv, states, silu=False)
        return causal_conv_drafts(x, weight, None, self.conv, states, silu=False)

    def _prompt(self, x: torch.Tensor, states: StateTiles) -> torch.Tensor:
        weight = self.conv1d.weight.squeeze(1)
        out = causal_conv(x, weight, None, self.conv, states, silu=False)
        store_rings(x, weight.shape[1], self.conv, states)
        return out
