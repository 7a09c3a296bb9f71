"""The gated delta net of Qwen3-Next and Qwen3.5 (Yang et al. 2024, arXiv:2412.06464), which takes attention's place.

A short convolution of queries, keys and values, the gated delta rule, and a norm with a gate. All parts of a layer are
divided among the ranks by key heads, with each its group of value heads.
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
from nanovllm.kernels.mixers.gated_delta_rule import DeltaRule, delta_rule_prompt, delta_rule_step
from nanovllm.kernels.mixers.state_pool import StatePool
from nanovllm.layers.layernorm import AllReduceRMSNorm, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.short_conv import ConvFilters
from nanovllm.layers.state import StateLayer
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import Float32Slice, LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig
    from nanovllm.kernels.mixers.state_rows import DraftedStateRows, StateRows, StateTiles


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


class GatedDeltaNet(StateLayer, LoadableModule):
    """The token mixer of one layer.

    Attributes:
        A_log, dt_bias: [value heads of this rank] float32; see `DeltaRule`. They have the names that they have in
            checkpoints.
        rule: the layer as kernels take it, between `bind` and `unbind`.
    """

    rule: DeltaRule

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        assert config.delta_net is not None and shard.key_heads is not None
        sizes = self.sizes = config.delta_net
        self.slice_size = sizes.value_size
        heads, by_head = shard.key_heads, config.architecture.delta_net == "heads"
        self.num_key_heads, self.value_heads = heads.size, heads.times(sizes.group)
        hidden_size, quant_config, value_size = config.hidden_size, config.quantization, sizes.group * sizes.value_size
        self.channels = heads.size * (2 * sizes.key_size + value_size)
        self.kept_size = self.channels + 2 * self.value_heads.size
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
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(self.value_heads.size, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(
            heads.times(value_size), hidden_size, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {
            WeightTarget(f"{name}.{param}"): Float32Slice.of((self.value_heads,), getattr(self, param).data)
            for param in ("A_log", "dt_bias")
        }

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        sizes = self.sizes
        return State({
            "recurrent": ((self.value_heads.size, sizes.key_size, sizes.value_size), torch.float32),
            "conv": ((sizes.conv_width + self.num_drafts, self.channels), dtype),
        })  # fmt: skip

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        sizes, filters = self.sizes, self.conv1d.weight.squeeze(1)
        self.rule = DeltaRule(
            self.num_key_heads, sizes.key_size, self.value_heads.size, sizes.value_size, filters, self.A_log,
            self.dt_bias, self.norm.weight, self.norm.eps,
            ConvState(pool.view(filters.dtype), places["conv"], sizes.conv_width + self.num_drafts),
            pool.view(torch.float32), places["recurrent"], self.kept,
        )  # fmt: skip

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.rule

    @override
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        if norm is not None and (not self.policy.fuses_norm(x.shape[-2]) or norm.communicator.size > 1):
            x, residual = norm(x, residual)
            norm = None
        qkvz, total = self.in_proj_qkvz(x, norm, residual)
        # Few rows are normalised again by the other product's kernel.
        ba, _ = self.in_proj_ba(x if norm is None or total is None else total, norm)
        return self._apply_rule(qkvz, ba).flatten(1), total

    def _apply_rule(self, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the delta rule, [num_tokens, value heads, value_size], and store the states."""
        return self.run(
            (qkvz, ba), partial(self._run_rule, delta_rule_step), partial(self._run_rule, delta_rule_prompt)
        )

    def _run_rule(
        self, run: Callable[..., torch.Tensor], qkvz: torch.Tensor, ba: torch.Tensor,
        states: StateRows | DraftedStateRows | StateTiles,
    ) -> torch.Tensor:  # fmt: skip
        z_shape = self.value_heads.size, self.sizes.value_size
        x, z = qkvz[:, : self.channels], qkvz[:, self.channels :].unflatten(1, z_shape)
        return run(self.rule, x, ba, z, states)
