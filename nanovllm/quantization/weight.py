"""The interface of a weight: the matrix of a linear layer, however it is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.distributed.shard import Shard
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope, qkv_rope_store
from nanovllm.kernels.rms_norm import Norm
from nanovllm.weights.slices import LoadableModule


@dataclass(frozen=True)
class MatrixShard:
    """What one rank holds of a linear layer's matrix, which may stack those of several projections.

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


class RoundedProduct(NamedTuple):
    """A product with rows in e4m3.

    Attributes:
        rounding: how it wants the rows.
        multiply: takes them, and whether to return SiLU of the first half of the outputs times the second.
        multiply_into: takes them and a residual; see `Weight.multiply_into`.
    """

    rounding: Rounding
    multiply: Callable[[Fp8Rows, bool], torch.Tensor]
    multiply_into: Callable[[Fp8Rows, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class Weight(LoadableModule, ABC):
    """The matrix of a linear layer, with the layer's bias if it has one; multiplies by itself.

    Its name in the model is `<layer>.weight`; the checkpoint's tensors have their names from the layer.
    """

    def takes_gate_up(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Return whether x may be [num_rows, 2 * inputs], of which SiLU of the first half times the second is meant."""
        return False

    @abstractmethod
    def multiply(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        """Return the layer's outputs for x, [num_rows, inputs], contiguous -> [num_rows, outputs].

        gated: return SiLU of the first half of the outputs times the second, [num_rows, outputs / 2].
        """

    def rounded_product(self, num_rows: int, dtype: torch.dtype) -> RoundedProduct | None:
        """Return what `multiply` does with so many rows of a dtype if it begins by rounding them to e4m3."""
        return None

    @abstractmethod
    def multiply_normed(
        self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `multiply(norm(x + residual))` and `x + residual`, which may be x itself.

        x: [num_rows, inputs], contiguous, or the parts of a sum, as `multiply_into` returns them; residual: None for 0.
        """

    @abstractmethod
    def multiply_into(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the x and the residual of the `multiply_normed` that follows: their sum is `multiply(x) + residual`.

        x: [num_rows, inputs], contiguous; residual: [num_rows, outputs]; may be overwritten.
        """

    def should_use_rope_store(self, x: torch.Tensor, rope: NormRope, pages: KVPages) -> bool:
        """Return whether `multiply_rope_store` has a kernel for x that is faster than a product and an op after it."""
        return False

    def multiply_rope_store(
        self, x: torch.Tensor, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """Return the queries of `qkv_rope_store` for the product with x, [num_tokens, inputs]; arguments as there."""
        head_dim = rope.cos_sin.shape[1]
        return qkv_rope_store(self.multiply(x).view(len(x), -1, head_dim), rope, positions, pages, slot_mapping)
