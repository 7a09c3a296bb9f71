"""Linear layers, and MLPs of them, split over the ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

A layer knows which part of the product is this rank's, and its weight how to compute it. A column-parallel layer begins
a branch, and takes the norm before it along, since there may be one kernel for both; a row-parallel layer ends one, and
may add its product to the residual itself. See `layers.layernorm` for the pair `(x, residual)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.kernels import ops
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.parallel.shard import Shard
from nanovllm.quantization import make_weight
from nanovllm.quantization.weight import MatrixShard, Stream, Weight

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig
    from nanovllm.configs.quantization import QuantizationConfig


class ColumnParallelLinear(nn.Module):
    """A product whose outputs are divided among the ranks."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None = None, residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> Stream:  # fmt: skip
        """Return `gate(norm(x + residual) @ weight.T + bias)`, and the sum `x + residual`; see `Weight.multiply`.

        Without a norm x is multiplied as it is, and residual is returned as it is. The gate is SwiGLU's (Shazeer 2020,
        arXiv:2002.05202).
        """
        if norm is None:
            return self.weight.multiply(x, gated=gated)[0], residual
        params = ops.Norm(norm.weight, norm.eps)
        if norm.communicator.size == 1:
            return self.weight.multiply(x, params, residual, gated)
        rounding = self.weight.row_rounding(x.shape[-2], ops.norm_dtype(x, params, residual))
        rows, total = norm(x, residual, rounding)
        return self.weight.multiply(rows, gated=gated)[0], total


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input as one product; see `MatrixShard` and `make_weight` for the arguments."""

    def __init__(
        self, in_features: int, outputs: dict[str | None, Shard], bias: bool = False,
        *, quant_config: QuantizationConfig | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        super().__init__(make_weight(quant_config, prefix, MatrixShard(outputs, Shard.whole(in_features)), bias))


class QKVParallelLinear(MergedColumnParallelLinear):
    """The projections to queries, keys and values of this rank's heads."""

    def __init__(
        self, in_features: int, head_dim: int, heads: Shard, kv_heads: Shard, bias: bool,
        *, quant_config: QuantizationConfig | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        q, kv = heads.times(head_dim), kv_heads.times(head_dim)
        super().__init__(in_features, {"q": q, "k": kv, "v": kv}, bias, quant_config=quant_config, prefix=prefix)


class RowParallelLinear(nn.Module):
    """The last projection of a branch, whose inputs are divided among the ranks: its product is a part of a sum."""

    def __init__(
        self, inputs: Shard, out_features: int, bias: bool = False,
        *, quant_config: QuantizationConfig | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.inputs = inputs
        self.weight = make_weight(quant_config, prefix, MatrixShard({None: Shard.whole(out_features)}, inputs), bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Stream:
        """Return the x and the residual of the norm that follows, whose sum is `x @ weight.T + residual`.

        Args:
            x: [num_rows, inputs of this rank]; or gate and up, [num_rows, 2 * inputs], where `Weight.takes_gate_up`.
            residual: [num_rows, out_features], which may be overwritten; or None for zero.
        """
        if self.inputs.is_whole and residual is not None:
            return self.weight.multiply_into(x, residual)
        return self.weight.multiply(x)[0], residual


class MLP(nn.Module):
    """An MLP of SwiGLU, or without a gate, of squares of positive values (So et al. 2021, arXiv:2109.08668).

    size: its columns of this rank.
    """

    def __init__(self, config: ModelConfig, size: Shard, prefix: str) -> None:
        super().__init__()
        hidden_size, quant_config = config.hidden_size, config.quantization
        self.is_gated = not config.architecture.has_single_blocks
        name = "gate_up_proj" if self.is_gated else "up_proj"
        outputs: dict[str | None, Shard] = {"gate": size, "up": size} if self.is_gated else {None: size}
        first = MergedColumnParallelLinear(hidden_size, outputs, quant_config=quant_config, prefix=f"{prefix}.{name}")
        self.add_module(name, first)
        self.down_proj = RowParallelLinear(size, hidden_size, quant_config=quant_config, prefix=f"{prefix}.down_proj")
        # In a tuple, so that it is registered under its own name alone.
        self._first = (first,)

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """The weights of the first product and the last one."""
        return self._first[0].weight, self.down_proj.weight

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> Stream:
        """Return the MLP of `norm(x + residual)`, [num_tokens, hidden_size], and the residual to add it to."""
        if not self.is_gated:
            up, residual = self._first[0](x, norm, residual)
            return self.down_proj(up.relu().square(), residual)
        dtype = x.dtype if norm is None else ops.norm_dtype(x, ops.Norm(norm.weight, norm.eps), residual)
        gated = not self.down_proj.weight.takes_gate_up(x.shape[-2], dtype)
        gate_up, residual = self._first[0](x, norm, residual, gated)
        return self.down_proj(gate_up, residual)
