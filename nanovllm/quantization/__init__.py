"""Weights: values, scales where they are quantised, how they are multiplied, and how they are loaded.

A layer holds a `Weight` and asks it to apply itself; dtype, layout and kernels are known here alone. There are two
kinds, `DenseWeight` and `Fp8Weight`; `make_weight` makes the one that the model's `QuantizationConfig` asks for. A
mixture holds an `ExpertsWeight`, whose matrices `fused_experts` takes.
"""
