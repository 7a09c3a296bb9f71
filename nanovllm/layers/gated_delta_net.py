"""The gated delta net of Qwen3-Next and Qwen3.5 (Yang et al. 2024, arXiv:2412.06464), which takes attention's place.

A short convolution of queries, keys and values, the gated delta rule, and a norm with a gate. All parts of a layer are
divided among the ranks by key heads, with each its group of value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nanovllm.kernels.mixers.gated_delta_rule import DeltaRule
from nanovllm.layers.layernorm import AllReduceRMSNorm, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.short_conv import ConvFilters, RecurrentLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import Stream

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig


def parts_of(name: str, key_heads: Shard, size: int, by_head: bool) -> dict[str | None, Shard]:
    """Return a projection as parts of a matrix.

    Args:
        name: of the projection.
        key_heads: of this rank.
        size: outputs of a key head.
        by_head: whether each head is a part, as where checkpoints store several projections head by head; such parts
            have the head's number after the name.
    """
    if not by_head:
        return {name: key_heads.times(size)}
    own = range(key_heads.start, key_heads.stop)
    return {f"{name}.{head}": Shard(0, size if head in own else 0, size) for head in range(key_heads.total)}


class GatedDeltaNet(RecurrentLayer):
    """The token mixer of one layer; its heads are the ones of values."""

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        assert config.delta_net is not None and shard.key_heads is not None
        sizes = self.sizes = config.delta_net
        self.slice_size = sizes.value_size
        heads, by_head = shard.key_heads, config.architecture.delta_net == "heads"
        self.num_key_heads, self.heads = heads.size, heads.times(sizes.group)
        self.state_shape = self.heads.size, sizes.key_size, sizes.value_size
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
        self.make_head_params()
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(
            heads.times(value_size), hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def make_recurrence(self, common: Mapping[str, Any]) -> DeltaRule:
        return DeltaRule(num_key_heads=self.num_key_heads, norm_weight=self.norm.weight, eps=self.norm.eps, **common)

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
        return self.run((x, ba, z), self.recurrence.step, self.recurrence.prompt).flatten(1), total
