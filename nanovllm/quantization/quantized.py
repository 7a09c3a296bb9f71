"""The parts that weights in e4m3 and in four bits share: a linear layer, and slices that are converted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Weight
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class QuantizedMatrix(LoadableModule, ABC):
    """Values and scales of a matrix, or of one for each expert.

    Args:
        shard: this rank's part of the matrix; inputs with a common scale must not be divided.
        config: the groups of values with a common scale, and their storage in the checkpoint.
        stack: sizes of the dimensions before the matrix's own: of experts their number.
    """

    values: nn.Parameter

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, stack: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shard, self.config = shard, config
        if shard.inputs.start % config.input_unit:
            raise ValueError(f"inputs {shard.inputs.start} ... of a rank begin within a group of {config.input_unit}")

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = nn.Parameter(torch.empty_like(self.values, device=device), requires_grad=False)
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, torch.empty_like(buffer, device=device))

    @property
    @abstractmethod
    def matrix(self) -> Any:
        """Values and scales as the kernels take them: `Fp8Matrix` or `FourBitMatrix`."""

    @abstractmethod
    def part_slices(self, target: WeightTarget, outputs: Shard, region: Any) -> dict[WeightTarget, WeightSlice]:
        """Return the slices of one projection's tensors.

        Args:
            target: the projection, with the layer's name as `param`.
            outputs: of this rank.
            region: the part of `matrix` where they go.
        """


class QuantizedWeight(QuantizedMatrix, Weight):
    """A linear layer's values and scales, and its bias, [outputs of this rank], if it has one."""

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, has_bias: bool = False) -> None:
        super().__init__(shard, config)
        self.bias = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False) if has_bias else None

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(dtype, device)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(self.bias, dtype=dtype, device=device), requires_grad=False)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        layer = name.rpartition(".")[0]
        slices, start = self.bias_slices(layer), 0
        for part, outputs in self.shard.outputs.items():
            region = self.matrix.outputs(start, start + outputs.size)
            slices |= self.part_slices(WeightTarget(layer, part), outputs, region)
            start += outputs.size
        return slices


@dataclass(frozen=True)
class ConvertedSlice(WeightSlice):
    """A slice of a tensor that is converted when it is stored. A factor multiplies float scales only.

    Attributes:
        convert: from the checkpoint's values to the region's; None if the tensor is not used.
        stored_as: dtypes that the tensor may have.
        shapes: other shapes that it may have.
        check: rejects values, given the tensor's name and a part of it; None if all can be stored.
    """

    has_model_dtype: ClassVar[bool] = False

    convert: Convert | None = None
    stored_as: tuple[torch.dtype, ...] = FLOATS
    shapes: tuple[tuple[int, ...], ...] = ()
    check: Callable[[str, torch.Tensor], None] | None = None

    @override
    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in self.stored_as:
            raise ValueError(f"tensor {name!r} is stored as {dtype}; the config asks for one of {self.stored_as}")

    @override
    def check_shape(self, name: str, shape: list[int]) -> None:
        if tuple(shape) not in (self.shape, *self.shapes):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(self.shape)}")

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        if self.check is not None:
            self.check(name, tensor[()])

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        self.check_values(name, values)
        if self.convert is not None:
            self.region.copy_(self.scaled(self.convert(values)))

    @override
    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        return super().scaled(values) if values.dtype in FLOATS else values
