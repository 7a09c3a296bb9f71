"""The interface of a weight: the matrix of a linear layer, however it is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel.shard import Shard
from nanovllm.weights.slices import LoadableModule


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


class Weight(LoadableModule, ABC):
    """The matrix of a linear layer, with the layer's bias if it has one; multiplies by itself.

    Its name in the model is `<layer>.weight`; the checkpoint's tensors have their names from the layer.
    """

    @abstractmethod
    def multiply(
        self,
        x: torch.Tensor | Fp8Rows,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `gate(norm(x + residual) @ weight.T + bias)`, and with a norm `x + residual`, which may be x itself.

        Args:
            x: [num_rows, inputs], contiguous; without a norm maybe in e4m3, as `row_rounding` says; with a norm maybe
                the parts of a sum, as `multiply_into` returns them.
            norm: RMSNorm before the product, or None.
            residual: [num_rows, inputs], or None for zero; only with a norm.
            gated: return SiLU of the first half of the outputs times the second, [num_rows, outputs / 2].
        """

    @abstractmethod
    def multiply_into(
        self, x: torch.Tensor | Fp8Rows, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the x and the residual of the norm that follows: their sum is `multiply(x) + residual`.

        x: [num_rows, inputs], contiguous, or in e4m3; residual: [num_rows, outputs]; may be overwritten.
        """

    def row_rounding(self, num_rows: int, dtype: torch.dtype) -> Rounding | None:
        """Return how `multiply` rounds rows of a dtype to e4m3 before the product; None if it does not."""
        return None

    def takes_gate_up(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Return whether x may be [num_rows, 2 * inputs]: SiLU of the first half times the second is multiplied."""
        return False
