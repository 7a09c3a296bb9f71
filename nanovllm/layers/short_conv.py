"""The gated short convolution of LFM2, which takes attention's place; its channels are divided among the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from nanovllm.kernels.mixers.causal_conv import causal_conv, causal_conv_rows, store_rings
from nanovllm.kernels.mixers.states import StateRows, StateTiles
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.state import ConvFilters, StateLayer
from nanovllm.parallel.shard import ModelShard
from nanovllm.quantization.weight import Stream

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig


class ShortConv(StateLayer):
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
