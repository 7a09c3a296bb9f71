"""The parts that weights in e4m3 and in four bits share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Weight
from nanovllm.weights.slices import LoadableModule, Slices, WeightTarget


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
    def part_slices(self, target: WeightTarget, outputs: Shard, region: Any) -> Slices:
        """Return the slices of the tensors of a projection, the `target`, with the layer's name as `param`.

        They go into `region`, a part of `matrix`; `outputs` are this rank's.
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
    def weight_slices(self, name: str) -> Slices:
        layer = name.rpartition(".")[0]
        slices, start = self.bias_slices(layer), 0
        for part, outputs in self.shard.outputs.items():
            region = self.matrix.outputs(start, start + outputs.size)
            slices |= self.part_slices(WeightTarget(layer, part), outputs, region)
            start += outputs.size
        return slices
