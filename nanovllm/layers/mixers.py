"""Layers with a state, which take attention's place: short convolutions, gated delta nets and Mamba-2.

All parts of a layer are divided among the ranks: by channels, by key heads, each with its group of value heads, or by
groups of heads that share keys and queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import StateSpec
from nanovllm.kernels.mixers.gated_delta_rule import DeltaRule
from nanovllm.kernels.mixers.mamba2 import StateSpace
from nanovllm.layers.layernorm import AllReduceRMSNorm, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.state import ConvFilters, StateLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig


class ShortConv(StateLayer):
    """LFM2's token mixer: `o_proj(c * conv(b * x))`, where b, c and x are projections of its input."""

    has_silu = False

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
        return c * self.run(self.conv, b * inner), total


class RecurrentLayer(StateLayer, LoadableModule):
    """A layer with a recurrence of heads after the convolution.

    Attributes:
        heads: of this rank; each has an element of `HEAD_PARAMS`, parameters that are kept in float32 and have the
            names that they have in checkpoints.
        state_shape: of a sequence's state, see `Recurrence`.
        recurrence: the layer as kernels take it, between `bind` and `unbind`.
    """

    HEAD_PARAMS: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    param_dtype = torch.float32

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    recurrence: DeltaRule | StateSpace

    def __init__(self, heads: Shard, state_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.heads, self.state_shape = heads, state_shape
        for name in self.HEAD_PARAMS:
            setattr(self, name, nn.Parameter(torch.empty(heads.size), requires_grad=False))

    @override
    def weight_slices(self, name: str) -> Slices:
        return {
            WeightTarget(f"{name}.{param}"): WeightSlice.of((self.heads,), getattr(self, param).data).in_float32()
            for param in self.HEAD_PARAMS
        }

    @override
    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        return {"recurrent": (self.state_shape, torch.float32), **super().state_spec(dtype)}

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.recurrence


def parts_of(name: str, key_heads: Shard, size: int, by_head: bool) -> dict[str | None, Shard]:
    """Return a projection, of `size` outputs for each of this rank's key heads, as parts of a matrix.

    With `by_head` each head is a part, with its number after the name: checkpoints store several projections like that.
    """
    if not by_head:
        return {name: key_heads.times(size)}
    own = range(key_heads.start, key_heads.stop)
    return {f"{name}.{head}": Shard(0, size if head in own else 0, size) for head in range(key_heads.total)}


class GatedDeltaNet(RecurrentLayer):
    """A convolution of queries, keys and values, the gated delta rule, and a norm with a gate; heads are of values."""

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        assert config.delta_net is not None and shard.key_heads is not None
        sizes, heads = config.delta_net, shard.key_heads
        super().__init__(heads.times(sizes.group), (heads.size * sizes.group, sizes.key_size, sizes.value_size))
        self.sizes, self.slice_size, self.num_key_heads = sizes, sizes.value_size, heads.size
        by_head = config.architecture.delta_net == "heads"
        hidden_size, quant_config, value_size = config.hidden_size, config.quantization, sizes.group * sizes.value_size
        per_head = {"q": sizes.key_size, "k": sizes.key_size, "v": value_size, "z": value_size}
        qkvz, ba = dict[str | None, Shard](), dict[str | None, Shard]()
        for name, size in per_head.items():
            qkvz |= parts_of(name, heads, size, by_head)
        for name in ("b", "a"):
            ba |= parts_of(name, heads, sizes.group, by_head)
        self.in_proj_qkvz = MergedColumnParallelLinear(
            hidden_size, qkvz, quant_config=quant_config, prefix=f"{prefix}.in_proj_qkvz"
        )
        # Decays need all their bits: e4m3 only where a checkpoint has it.
        is_stored = quant_config is not None and quant_config.is_stored
        self.in_proj_ba = MergedColumnParallelLinear(
            hidden_size, ba, quant_config=quant_config if is_stored else None, prefix=f"{prefix}.in_proj_ba"
        )
        self.conv1d = ConvFilters({name: heads.times(per_head[name]) for name in ("q", "k", "v")}, sizes.conv_width)
        self.kept_size = self.conv1d.channels + 2 * self.heads.size
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(
            heads.times(value_size), hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def bind(self, pool: torch.Tensor, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        self.recurrence = DeltaRule(
            conv=self.conv, state=self.states["recurrent"], a_log=self.A_log, dt_bias=self.dt_bias, kept=self.kept,
            norm_weight=self.norm.weight, eps=self.norm.eps, num_key_heads=self.num_key_heads,
        )  # fmt: skip

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        if norm is not None and (not self.policy.fuses_norm(x.shape[-2]) or norm.communicator.size > 1):
            x, residual = norm(x, residual)
            norm = None
        qkvz, total = self.in_proj_qkvz(x, norm, residual)
        # Few rows are normalised again by the other product's kernel.
        ba, _ = self.in_proj_ba(x if norm is None or total is None else total, norm)
        channels = self.conv1d.channels
        x, z = qkvz[:, :channels], qkvz[:, channels:].unflatten(1, (self.heads.size, self.sizes.value_size))
        return self.run(self.recurrence, x, ba, z).flatten(1), total


class Mamba(RecurrentLayer):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a convolution of inputs, keys and queries, a state space, a norm."""

    HEAD_PARAMS = ("A_log", "dt_bias", "D")

    D: nn.Parameter

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        assert config.mamba is not None and shard.mamba_groups is not None
        sizes, groups, quant_config = config.mamba, shard.mamba_groups, config.quantization
        heads = groups.times(sizes.num_heads // sizes.num_groups)
        super().__init__(heads, (heads.size, sizes.state_size, sizes.head_size))
        self.sizes, self.groups, self.slice_size = sizes, groups, sizes.head_size & -sizes.head_size
        inner, keys = heads.times(sizes.head_size), groups.times(sizes.state_size)
        channels: dict[str | None, Shard] = {"x": inner, "b": keys, "c": keys}
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, {"z": inner, **channels, "dt": heads}, quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        self.conv1d = ConvFilters(channels, sizes.conv_width, sizes.has_conv_bias)
        self.kept_size = self.conv1d.channels + heads.size
        self.norm = RMSNorm(inner, sizes.norm_eps) if sizes.has_norm else None
        self.o_proj = RowParallelLinear(
            inner, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def bind(self, pool: torch.Tensor, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        self.recurrence = StateSpace(
            conv=self.conv, state=self.states["recurrent"], a_log=self.A_log, dt_bias=self.dt_bias, kept=self.kept,
            norm_weight=None if self.norm is None else self.norm.weight, eps=self.sizes.norm_eps,
            num_groups=self.groups.size, d=self.D, step_limits=self.sizes.step_limits,
        )  # fmt: skip

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        projected, total = self.in_proj(x, norm, residual)
        heads, size = self.heads.size, self.sizes.head_size
        z, channels, dt = projected.split([heads * size, self.conv1d.channels, heads], 1)
        return self.run(self.recurrence, channels, dt, z), total


class ParallelMixer(nn.Module):
    """Attention and a layer with a state, of the same input (Hymba, arXiv:2411.13676); their outputs are added up."""

    def __init__(self, attention: nn.Module, mamba: nn.Module) -> None:
        super().__init__()
        self.attention, self.mamba = attention, mamba

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm, residual: torch.Tensor | None, positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Stream:  # fmt: skip
        """Return the mixed tokens of `norm(x + residual)`, and the residual to add them to, of `rows`, or of all."""
        x, total = norm(x, residual)
        attended, _ = self.attention(x, None, None, positions, rows)
        mixed, _ = self.mamba(x, None, None, positions, rows)
        return attended + mixed, total if rows is None else total[rows]


def make_mixer(config: ModelConfig, shard: ModelShard, prefix: str) -> StateLayer:
    """Return the layer that a model of this config has; prefix: the name of the decoder layer in the checkpoint."""
    if config.delta_net is not None:
        return GatedDeltaNet(config, shard, f"{prefix}.linear_attn")
    if config.mamba is not None:
        return Mamba(config, shard, f"{prefix}.{'mixer' if config.architecture.has_single_blocks else 'mamba'}")
    return ShortConv(config, shard, f"{prefix}.conv")
