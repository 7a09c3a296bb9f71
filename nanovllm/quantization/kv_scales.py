"""The scales of a KV cache in e4m3, as a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import KVGranularity
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.fp8 import ScaleSlice
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget


class KVCacheScales(LoadableModule):
    """The scales of one layer's keys and values.

    Args:
        kv_heads: this rank's KV heads.
        granularity: what has one scale: all heads ("tensor"), or each ("head").

    Attributes:
        k_scale, v_scale: [KV heads of this rank] float32.
    """

    def __init__(self, kv_heads: Shard, granularity: KVGranularity) -> None:
        super().__init__()
        self.kv_heads, self.granularity = kv_heads, granularity
        self.k_scale, self.v_scale = (
            nn.Parameter(torch.empty(kv_heads.size, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return the scales of this rank's heads."""
        total = self.kv_heads.total
        shapes = ((), (1,)) if self.granularity == "tensor" else ((total,), (total, 1, 1))
        index = () if self.granularity == "tensor" else (self.kv_heads.present,)
        return {
            WeightTarget(f"{name}.{scale}"): KVScaleSlice(shapes[0], index, getattr(self, scale).data[:, None], shapes)
            for scale in ("k_scale", "v_scale")
        }


@dataclass(frozen=True)
class KVScaleSlice(ScaleSlice):
    """Scales by which what is stored is divided first."""

    def check_values(self, name: str, tensor: Any) -> None:
        """Refuse a scale that is no finite number above 0."""
        values: torch.Tensor = tensor[()]
        if not (values.isfinite() & (values > 0)).all():
            raise ValueError(f"scales {name!r} must be finite and positive")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        super().store(name, values.flatten())
