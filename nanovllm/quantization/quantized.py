"""The parts that weights in e4m3 and in four bits share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.quantization.weight import MatrixShard, Place, Weight


class QuantizedWeight(Weight):
    """Values and scales, as buffers, of a matrix, or of one for each expert.

    config: the groups of values with a common scale, and their storage in the checkpoint; inputs with a common scale
    must not be divided.
    """

    values: nn.Parameter

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, has_bias: bool = False) -> None:
        super().__init__(shard, has_bias)
        self.config = config
        if shard.inputs.start % config.input_unit:
            raise ValueError(f"inputs {shard.inputs.start} ... of a rank begin within a group of {config.input_unit}")

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = nn.Parameter(torch.empty_like(self.values, device=device), requires_grad=False)
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, torch.empty_like(buffer, device=device))
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(self.bias, dtype=dtype, device=device), requires_grad=False)

    def region(self, place: Place) -> Any:
        """Return a projection's part of the matrix, or of an expert's."""
        matrix: Any = self.matrix
        return (matrix if place.expert is None else matrix.expert(place.expert)).outputs(place.start, place.stop)
