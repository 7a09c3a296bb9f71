"""What a weight is: its values (and scales, where it is quantised), how it is multiplied, and how it is loaded.

A layer holds a `Weight` and asks it to apply itself; dtype, layout and kernels are known here alone. There are two
kinds, `DenseWeight` and `Fp8Weight`; `make_weight` makes the one that the model's `QuantizationConfig` asks for. A
mixture holds an `ExpertsWeight`, whose matrices `fused_experts` takes.
"""
