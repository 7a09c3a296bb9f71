"""A weight in the dtype of the activations."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from nanovllm.kernels._triton import device_limits, is_hopper
from nanovllm.kernels.linear import choose
from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from nanovllm.kernels.rms_norm import Norm, rms_norm
from nanovllm.quantization.weight import MatrixShard, Weight
from nanovllm.weights.slices import WeightSlice, WeightTarget


class DenseWeight(Weight):
    """Values, one for each output and input.

    Args:
        shard: this rank's part of the matrix.
        has_bias: whether the layer has a bias.

    Attributes:
        values: [outputs of this rank, inputs of this rank].
        bias: [outputs of this rank], or None.
    """

    kernel_rows = 1, 2, choose.MAX_SKINNY_ROWS + 1, 33, choose.SPLITK_ROWS + 1, 129, 193
    kernel_tokens = (choose.SPLITK_ROWS + 1,)

    def __init__(self, shard: MatrixShard, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = shard
        self.values = nn.Parameter(torch.empty(shard.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False) if has_bias else None

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection's weight, and of its bias."""
        layer, _, _ = name.rpartition(".")
        outputs, sizes = self.shard.outputs.items(), [shard.size for shard in self.shard.outputs.values()]
        slices = {}
        for (part, shard), region in zip(outputs, self.values.data.split(sizes), strict=True):
            slices[WeightTarget(f"{layer}.weight", part)] = WeightSlice.of((shard, self.shard.inputs), region)
        if self.bias is not None:
            for (part, shard), region in zip(outputs, self.bias.data.split(sizes), strict=True):
                slices[WeightTarget(f"{layer}.bias", part)] = WeightSlice.of((shard,), region)
        return slices

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n] -> [n, inputs], the values of these outputs."""
        return functional.embedding(rows, self.values)

    def multiply(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        """See the base class."""
        return norm_linear(x, self.values, self.bias, gated=gated)[0]

    def multiply_normed(
        self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; for small batches in one kernel."""
        if x.dim() == 3:
            # Kernels of few rows normalise, but add up no parts.
            normed, total = rms_norm(x, norm.weight, norm.eps, residual)
            return self.multiply(normed, gated), total
        return norm_linear(x, self.values, self.bias, norm, residual, gated)

    def multiply_into(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the base class; only without a bias."""
        assert self.bias is None
        return linear_into(x, self.values, residual)

    def should_use_rope_store(self, x: torch.Tensor, rope: NormRope, pages: KVPages) -> bool:
        """See the base class."""
        if rope.norm_weights is None or self.bias is not None or pages.scales is not None or not is_hopper(x.device):
            return False
        has_head_dim = rope.cos_sin.shape[1] == choose.PERSISTENT_COLUMNS
        return has_head_dim and choose.should_use_persistent(x.shape[-2], self.values)

    def multiply_rope_store(
        self, x: torch.Tensor, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """See the base class; only if `should_use_rope_store`."""
        from nanovllm.kernels.linear.persistent_gemm import persistent_qkv_rope_store  # noqa: PLC0415

        num_programs = device_limits(x.device)[0]
        return persistent_qkv_rope_store(x, self.values, rope, positions, pages, slot_mapping, num_programs)
