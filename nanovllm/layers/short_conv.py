"""Short convolutions, which take attention's place: alone with gates (LFM2), or before a recurrence of heads.

Channels are divided among the ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import State
from nanovllm.kernels.mixers.causal_conv import causal_conv, causal_conv_rows, store_rings
from nanovllm.kernels.mixers.states import ConvState, StatePool, StateRows, StateTiles
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.state import StateLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import MatrixShard, Stream
from nanovllm.weights.slices import Float32Slice, LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig
    from nanovllm.kernels.mixers.recurrence import Recurrence


class ConvFilters(LoadableModule):
    """The filters of a convolution of each channel: weight, [channels of this rank, 1, width], and maybe a bias."""

    def __init__(self, parts: Mapping[str | None, Shard], width: int, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = MatrixShard(parts, Shard.whole(width))
        self.channels, self.width = self.shard.size
        self.weight = nn.Parameter(torch.empty(self.channels, 1, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.channels), requires_grad=False) if has_bias else None

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


class ConvLayer(StateLayer):
    """A layer with a short convolution.

    Attributes:
        conv1d: its filters.
        conv: where inputs of the convolution are kept, between `bind` and `unbind`.
    """

    conv1d: ConvFilters
    conv: ConvState

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        return State({"conv": ((self.conv1d.width + self.num_drafts, self.conv1d.channels), dtype)})

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        filters = self.conv1d
        self.conv = ConvState(pool.view(filters.weight.dtype), places["conv"], filters.width + self.num_drafts)

    @override
    def unbind(self) -> None:
        del self.conv


class ShortConv(ConvLayer):
    """The token mixer of one layer: `o_proj(c * conv(b * x))`, where b, c and x are projections of its input."""

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
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        projected, total = self.in_proj(x, norm, residual)
        b, c, inner = projected.chunk(3, 1)
        gated = b * inner
        return c * self.run([gated], self._step, self._prompt), total

    def _step(self, x: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return causal_conv_rows(x, self.conv1d.weight.squeeze(1), None, self.conv, rows, silu=False)

    def _prompt(self, x: torch.Tensor, tiles: StateTiles) -> torch.Tensor:
        out = causal_conv(x, self.conv1d.weight.squeeze(1), None, self.conv, tiles, silu=False)
        store_rings(x, self.conv1d.width, self.conv, tiles)
        return out


class RecurrentLayer(ConvLayer, LoadableModule):
    """A layer with a recurrence of heads after the convolution.

    Attributes:
        heads: of this rank; each has an element of `HEAD_PARAMS`, parameters that are kept in float32 and have the
            names that they have in checkpoints.
        state_shape: of a sequence's state, see `Recurrence`.
        recurrence: the layer as kernels take it, between `bind` and `unbind`.
    """

    HEAD_PARAMS: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    heads: Shard
    state_shape: tuple[int, int, int]
    recurrence: Recurrence

    def make_head_params(self) -> None:
        """Create the parameters of heads."""
        for name in self.HEAD_PARAMS:
            setattr(self, name, nn.Parameter(torch.empty(self.heads.size), requires_grad=False))

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {
            WeightTarget(f"{name}.{param}"): Float32Slice.of((self.heads,), getattr(self, param).data)
            for param in self.HEAD_PARAMS
        }

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        return State({"recurrent": (self.state_shape, torch.float32), **super().state_spec(dtype).tensors})

    @abstractmethod
    def make_recurrence(self, common: Mapping[str, Any]) -> Recurrence:
        """Return the layer as kernels take it; common: arguments that all recurrences have."""

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        self.recurrence = self.make_recurrence({
            "conv_weight": self.conv1d.weight.squeeze(1), "conv_bias": self.conv1d.bias, "a_log": self.A_log,
            "dt_bias": self.dt_bias, "conv": self.conv, "pool": pool.view(torch.float32),
            "first": places["recurrent"], "shape": self.state_shape, "kept": self.kept,
        })  # fmt: skip

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.recurrence
