"""The matrix of a linear layer: the interface of a weight, however it is stored, and the plain weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from nanovllm.kernels import ops
from nanovllm.parallel.shard import Shard
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.kernels.linear.norm_linear import WeightMatrix
    from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
    from nanovllm.kernels.rms_norm import Norm

Rows: TypeAlias = "torch.Tensor | Fp8Rows"
"""[num_rows, inputs], contiguous, maybe in e4m3."""
Stream: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden states as x and residual, whose sum they are; None for zero. See `layers.layernorm`."""


@dataclass(frozen=True)
class MatrixShard:
    """One rank's part of a linear layer's matrix, which may stack the matrices of several projections.

    Attributes:
        outputs: outputs of each projection, by the name of its part of the weight, in order; None is the only one.
        inputs: the inputs of all.
    """

    outputs: Mapping[str | None, Shard]
    inputs: Shard

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of this rank."""
        return sum(shard.size for shard in self.outputs.values()), self.inputs.size

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str | None, Shard, torch.Tensor]]:
        """Yield each projection's name, outputs, and rows of a tensor that has one for each output of this rank."""
        shards = self.outputs.values()
        return zip(self.outputs, shards, tensor.split([shard.size for shard in shards]), strict=True)


class Weight(LoadableModule, ABC):
    """The matrix of a linear layer, with the layer's bias if it has one; multiplies by itself.

    Its name in the model is `<layer>.weight`; the checkpoint's tensors have their names from the layer.
    """

    shard: MatrixShard
    bias: nn.Parameter | None

    @property
    @abstractmethod
    def matrix(self) -> WeightMatrix:
        """The matrix as the kernels take it."""

    def bias_slices(self, layer: str) -> Slices:
        """Return this rank's slices of the bias; of ranks that divide inputs the first one has it, others zeros."""
        slices: Slices = {}
        if self.bias is not None:
            factor = float(self.shard.inputs.start == 0)
            for part, outputs, region in self.shard.split(self.bias.data):
                slices[WeightTarget(f"{layer}.bias", part)] = replace(WeightSlice.of((outputs,), region), factor=factor)
        return slices

    def multiply(
        self, x: Rows, norm: Norm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> Stream:
        """Return `gate(norm(x + residual) @ weight.T + bias)`, and with a norm `x + residual`, which may be x itself.

        Args:
            x: [num_rows, inputs], contiguous; without a norm maybe in e4m3, as `row_rounding` says; with a norm maybe
                the parts of a sum, as `multiply_into` returns them.
            norm: RMSNorm before the product, or None.
            residual: [num_rows, inputs], or None for zero; only with a norm.
            gated: return SiLU of the first half of the outputs times the second, [num_rows, outputs / 2].
        """
        assert isinstance(x, torch.Tensor)
        return ops.norm_linear(x, self.matrix, self.bias, norm, residual, gated, policy=self.policy)

    def multiply_last(self, x: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Return the last outputs of `multiply` alone, [num_rows, num_outputs]; rows may have a stride."""
        return self.multiply(x)[0][:, -num_outputs:]

    def multiply_into(self, x: Rows, residual: torch.Tensor) -> Stream:
        """Return the x and the residual of the norm that follows: their sum is `multiply(x) + residual`.

        x: [num_rows, inputs], contiguous, or in e4m3; residual: [num_rows, outputs]; may be overwritten.
        """
        if self.bias is not None:
            return self.multiply(x)[0], residual
        return ops.linear_into(x, self.matrix, residual, self.policy)

    def row_rounding(self, num_rows: int, dtype: torch.dtype) -> Rounding | None:
        """Return how `multiply` rounds rows of a dtype to e4m3 before the product; None if it does not."""
        return None

    def takes_gate_up(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Return whether x may be [num_rows, 2 * inputs]: SiLU of the first half times the second is multiplied."""
        return False


class DenseWeight(Weight):
    """Values in the dtype of the activations, one for each output and input.

    Attributes:
        values: [outputs of this rank, inputs of this rank].
        bias: [outputs of this rank], or None.
    """

    def __init__(self, shard: MatrixShard, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = shard
        self.values = nn.Parameter(torch.empty(shard.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False) if has_bias else None

    @property
    @override
    def matrix(self) -> torch.Tensor:
        return self.values

    @override
    def weight_slices(self, name: str) -> Slices:
        layer, shard = name.rpartition(".")[0], self.shard
        slices = {
            WeightTarget(f"{layer}.weight", part): WeightSlice.of((outputs, shard.inputs), region)
            for part, outputs, region in shard.split(self.values.data)
        }
        return slices | self.bias_slices(layer)

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n] -> [n, inputs], the values of these outputs."""
        return functional.embedding(rows, self.values)

    @property
    @override
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        return self.policy.dense_rows, self.policy.dense_tokens

    @override
    def multiply_last(self, x: torch.Tensor, num_outputs: int) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[-num_outputs:]
        return ops.norm_linear(x, self.values[-num_outputs:], bias, policy=self.policy)[0]
