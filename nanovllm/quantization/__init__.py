"""Weights: values, scales where they are quantised, how they are multiplied, and how they are loaded.

A layer holds a `Weight` and asks it to apply itself; dtype, layout and kernels are known here alone. There are three
kinds, `DenseWeight`, `Fp8Weight` and `FourBitWeight`; `make_weight` makes the one that the model's `QuantizationConfig`
asks for. Mixtures have the same, with a matrix for each expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.quantization.weight import DenseWeight, MatrixShard, Weight

if TYPE_CHECKING:
    from nanovllm.configs.quantization import QuantizationConfig


def make_weight(
    quant_config: QuantizationConfig | None, prefix: str, shard: MatrixShard, has_bias: bool = False
) -> Weight:
    """Return the weight of the layer `prefix`, not yet filled; without a `quant_config` in 16 or 32 bits."""
    if quant_config is None or quant_config.ignores(prefix, shard.outputs):
        return DenseWeight(shard, has_bias)
    if quant_config.four_bits is not None:
        from nanovllm.quantization.four_bits import FourBitWeight  # noqa: PLC0415

        return FourBitWeight(shard, quant_config, has_bias)
    from nanovllm.quantization.fp8 import Fp8Weight  # noqa: PLC0415

    return Fp8Weight(shard, quant_config, has_bias)
