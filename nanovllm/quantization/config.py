"""The weight that a linear layer or a mixture has, by the model's quantisation."""

from __future__ import annotations

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.dense import DenseWeight
from nanovllm.quantization.experts import DenseExpertsWeight, ExpertsWeight, Fp8ExpertsWeight
from nanovllm.quantization.fp8 import Fp8Weight
from nanovllm.quantization.weight import MatrixShard, Weight


def make_weight(
    quant_config: QuantizationConfig | None, prefix: str, shard: MatrixShard, has_bias: bool = False
) -> Weight:
    """Return the weight of a layer, not yet filled.

    Args:
        quant_config: of the model; None if nothing is quantised.
        prefix: name of the layer in the model.
        shard: this rank's part of the matrix.
        has_bias: whether the layer has a bias.
    """
    if quant_config is None or quant_config.ignores(prefix, shard.outputs):
        return DenseWeight(shard, has_bias)
    return Fp8Weight(shard, quant_config, has_bias)


def make_experts_weight(
    quant_config: QuantizationConfig | None, prefix: str, experts: Shard, shard: MatrixShard
) -> ExpertsWeight:
    """Return the weight of one projection of all experts, not yet filled.

    Args:
        quant_config, shard: see `make_weight`.
        prefix: name of the projection in the model.
        experts: of this rank.
    """
    # A checkpoint has the modules of each expert; where one is stored as it is and another is not, scales are missing.
    parent, _, name = prefix.rpartition(".")
    if quant_config is None or quant_config.ignores(f"{parent}.0.{name}", shard.outputs):
        return DenseExpertsWeight(experts, shard)
    return Fp8ExpertsWeight(experts, shard, quant_config)
