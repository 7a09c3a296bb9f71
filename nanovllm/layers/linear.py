"""Linear layers split over the ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

A layer knows which part of the product is this rank's, and its weight how to compute it. A layer computes nothing by
itself: it returns its product as an object, and what takes that may have one kernel for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from nanovllm.distributed.shard import Shard
from nanovllm.kernels.linear.quantize_rows import Fp8Rows
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from nanovllm.layers.layernorm import DeferredBranch, LinearInput
from nanovllm.quantization.config import make_weight
from nanovllm.quantization.weight import MatrixShard, RoundedProduct, Weight
from nanovllm.quantization_config import QuantizationConfig


@dataclass(frozen=True)
class Projection:
    """A column-parallel layer's product, not computed yet."""

    weight: Weight
    x: LinearInput

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return self.x.branch.shape[-2]

    def compute(self, gated: bool = False) -> torch.Tensor:
        """Return the product, [num_tokens, outputs of this rank].

        gated: return SiLU of the first half of the outputs times the second (SwiGLU, Shazeer 2020, arXiv:2002.05202).
        """
        return self.x.multiply(self.weight, gated)

    def compute_for(self, weight: Weight) -> torch.Tensor:
        """Return gate and up, of which SiLU(gate) * up is meant, as the weight that multiplies them next takes them."""
        return self.compute(gated=not weight.takes_gate_up(self.num_rows, self.x.dtype))

    def rope_store(
        self, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        """Compute `qkv_rope_store` of the product in one kernel; None if that is not supported or not faster.

        The arguments are those of `qkv_rope_store`. Returns the queries, [num_tokens, num_heads, head_dim].
        """
        if not self.weight.should_use_rope_store(self.x.branch, rope, pages):
            return None
        return self.weight.multiply_rope_store(self.x.compute(), rope, positions, pages, slot_mapping)


class ColumnParallelLinear(nn.Module):
    """A product of which each rank has some outputs, not computed until it is taken."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: LinearInput) -> Projection:
        """Return the product with x, not computed yet."""
        return Projection(self.weight, x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x, [num_rows, in_features]."""
        return self.weight.multiply(x)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input as one product.

    Args:
        in_features: size of the input.
        outputs: outputs of each projection, by the name of its part of the weight, in order.
        bias: whether the projections have biases.
        quant_config, prefix: see `make_weight`.
    """

    def __init__(
        self,
        in_features: int,
        outputs: dict[str | None, Shard],
        bias: bool = False,
        *,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(make_weight(quant_config, prefix, MatrixShard(outputs, Shard.whole(in_features)), bias))


class QKVParallelLinear(MergedColumnParallelLinear):
    """The projections to queries, keys and values of this rank's heads."""

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        heads: Shard,
        kv_heads: Shard,
        bias: bool,
        *,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        q, kv = heads.times(head_dim), kv_heads.times(head_dim)
        super().__init__(in_features, {"q": q, "k": kv, "v": kv}, bias, quant_config=quant_config, prefix=prefix)


class RowParallelLinear(nn.Module):
    """The last projection of a branch, of which each rank has some inputs.

    Its product is one rank's part of a sum, which is left to the norm that follows.
    """

    def __init__(
        self, inputs: Shard, out_features: int, *, quant_config: QuantizationConfig | None = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = make_weight(quant_config, prefix, MatrixShard({None: Shard.whole(out_features)}, inputs))

    def forward(
        self,
        x: torch.Tensor | Projection | Fp8Rows,
        rows: torch.Tensor | None = None,
        product: RoundedProduct | None = None,
    ) -> DeferredBranch:
        """Return the product, not computed yet, for the residual stream.

        Args:
            x: [num_rows, inputs of this rank], contiguous; or gate and up, of which SiLU(gate) * up is meant.
            rows: [num_rows]; the rows of the stream that x has, if not all. The stream loses the others.
            product: takes x, if that is in e4m3.
        """
        if isinstance(x, Fp8Rows):
            assert product is not None
            return DeferredBranch(partial(self._add_rounded, x, product))
        if isinstance(x, Projection):
            x = x.compute_for(self.weight)
        return DeferredBranch(partial(self._add_to, x), rows)

    def _add_rounded(
        self, x: Fp8Rows, product: RoundedProduct, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.inputs.is_whole and residual is not None:
            return product.multiply_into(x, residual)
        return product.multiply(x, False), residual

    def _add_to(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.inputs.is_whole and residual is not None:
            return self.weight.multiply_into(x, residual)
        return self.weight.multiply(x), residual
