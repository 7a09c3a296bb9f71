"""The matrix of a linear layer: the interface of a weight, however it is stored, and the plain weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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


class Place(NamedTuple):
    """Outputs `start ... stop - 1` of the matrix here; expert: of that expert of this rank, None in a linear layer."""

    expert: int | None
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of all outputs, [outputs, ...] or [experts, outputs, ...]."""
        return (tensor if self.expert is None else tensor[self.expert])[self.start : self.stop]


@dataclass(frozen=True)
class MatrixShard:
    """One rank's part of a linear layer's matrix, which may stack the matrices of several projections.

    Attributes:
        outputs: outputs of each projection, by the name of its part of the weight, in order; None is the only one.
        inputs: the inputs of all.
        experts: this rank's experts, each with such a matrix; None for a linear layer.
    """

    outputs: Mapping[str | None, Shard]
    inputs: Shard
    experts: Shard | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of this rank."""
        return sum(shard.size for shard in self.outputs.values()), self.inputs.size

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the dimensions before the matrix's own: of experts their number."""
        return () if self.experts is None else (self.experts.size,)

    def projections(self, expert: int | None = None) -> Iterator[tuple[str | None, Shard, Place]]:
        """Yield each projection's name, this rank's outputs, and their place; another rank's expert has no outputs."""
        stop, place, is_here = 0, None, True
        if self.experts is not None and expert is not None:
            is_here = self.experts.start <= expert < self.experts.stop
            place = expert - self.experts.start if is_here else 0
        for part, outputs in self.outputs.items():
            held = outputs if is_here else Shard(0, 0, outputs.total)
            start, stop = stop, stop + held.size
            yield part, held, Place(place, start, stop)


class Weight(LoadableModule, ABC):
    """The matrix of a linear layer, with the layer's bias if it has one; multiplies by itself.

    Or a mixture's matrices, one for each expert, which `fused_experts` takes. Its name in the model is
    `<layer>.weight`; the checkpoint's tensors have their names from the layer.

    Attributes:
        shard: this rank's part of the matrix, or of each expert's.
        bias: [outputs of this rank], or [experts of this rank, outputs of this rank]; or None.
        alternates: whether a checkpoint stacks all experts, with outputs of projections in turn; see `ExpertsConfig`.
    """

    alternates: bool = False

    def __init__(self, shard: MatrixShard, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = shard
        self.bias = nn.Parameter(torch.empty(*shard.stack, shard.size[0]), requires_grad=False) if has_bias else None

    @property
    @abstractmethod
    def matrix(self) -> WeightMatrix:
        """The matrix as the kernels take it."""

    @abstractmethod
    def part_slices(self, outputs: Shard, place: Place) -> dict[str, WeightSlice]:
        """Return the slices of a projection's tensors but its bias, by their names in the layer."""

    def bias_slices(self, outputs: Shard, place: Place) -> dict[str, WeightSlice]:
        """Return the slice of a projection's bias; of ranks that divide inputs the first one has it, others zeros."""
        assert self.bias is not None
        part = replace(WeightSlice.of((outputs,), place.of(self.bias.data)), factor=float(self.shard.inputs.start == 0))
        return {"bias": part}

    @override
    def weight_slices(self, name: str) -> Slices:
        """Return this rank's slices of each projection, of each expert: nothing of other ranks' experts."""
        layer, experts, slices = name.rpartition(".")[0], self.shard.experts, Slices()
        for slices_of in [self.part_slices] if self.bias is None else [self.part_slices, self.bias_slices]:
            for expert in [None] if experts is None else range(experts.total):
                made = {part: slices_of(outputs, place) for part, outputs, place in self.shard.projections(expert)}
                if self.alternates:
                    from nanovllm.quantization.experts import woven  # noqa: PLC0415

                    made = {None: woven(list(made.values()))}
                for part, tensors in made.items():
                    slices |= {WeightTarget(f"{layer}.{tensor}", part, expert): own for tensor, own in tensors.items()}
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

    def multiply_into(self, x: torch.Tensor, residual: torch.Tensor) -> Stream:
        """Return the x and the residual of the norm that follows: their sum is `multiply(x) + residual`.

        x: [num_rows, inputs], contiguous; residual: [num_rows, outputs]; may be overwritten.
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
        values: [outputs of this rank, inputs of this rank], after the experts of this rank if there are some.
    """

    def __init__(self, shard: MatrixShard, has_bias: bool = False) -> None:
        super().__init__(shard, has_bias)
        self.values = nn.Parameter(torch.empty(*shard.stack, *shard.size), requires_grad=False)

    @property
    @override
    def matrix(self) -> torch.Tensor:
        return self.values

    @override
    def part_slices(self, outputs: Shard, place: Place) -> dict[str, WeightSlice]:
        return {"weight": WeightSlice.of((outputs, self.shard.inputs), place.of(self.values.data))}

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n] -> [n, inputs], the values of these outputs."""
        return functional.embedding(rows, self.values)

    @property
    @override
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        return self.policy.dense_rows, self.policy.dense_tokens
