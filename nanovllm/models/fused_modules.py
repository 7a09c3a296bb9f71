"""Modules with this library's kernels that replace modules of a transformers model.

`fuse.py` finds out where. Each has the signature of the module that it replaces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import DenseWeight, MatrixShard, Weight

_positions: ContextVar[torch.Tensor] = ContextVar("positions")


@contextmanager
def step_positions(positions: torch.Tensor) -> Iterator[None]:
    """Set the positions of a step's tokens, [num_tokens] int32, for fused attention."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


class FusedLinear(nn.Module):
    """A linear layer with our kernel; its parameters stay visible to the model's code."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.product = dense_weight(linear.weight, linear.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, [out_features, in_features]."""
        return self.product.values

    @property
    def bias(self) -> torch.Tensor | None:
        """[out_features], or None."""
        return self.product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return self.product.multiply(x.reshape(-1, x.shape[-1]))[0].unflatten(0, x.shape[:-1])


class FusedNorm(RMSNorm):
    """An RMS norm with our kernel, whose weight is the factor of the replaced module, `source`."""

    def __init__(self, weight: torch.Tensor, eps: float, source: nn.Module) -> None:
        super().__init__(len(weight), eps)
        self.weight = nn.Parameter(weight, requires_grad=False)
        # In a tuple, so that it is not registered as a submodule.
        self._source = (source,)

    @property
    def source(self) -> nn.Module:
        """The replaced module."""
        return self._source[0]

    def refresh(self) -> None:
        """Recompute the weight after a parameter of the source was loaded."""
        self.weight.copy_(norm_factor(self.source, self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same shape."""
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps)[0].view(x.shape)


class FusedMLP(nn.Module):
    """A SwiGLU MLP with two products."""

    def __init__(self, gate_up_proj: Weight, down_proj: Weight) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size] -> the same shape."""
        gated, _ = self.gate_up_proj.multiply(x.reshape(-1, x.shape[-1]), gated=True)
        return self.down_proj.multiply(gated)[0].view(x.shape)


class FusedAttention(nn.Module):
    """Attention with one product for queries, keys and values, and one kernel for norm, RoPE and store."""

    def __init__(self, qkv_proj: Weight, o_proj: Weight, norms: list[FusedNorm], attn: Attention) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj, self.attn = qkv_proj, o_proj, attn
        self.q_norm: FusedNorm | None
        self.k_norm: FusedNorm | None
        self.q_norm, self.k_norm = (norms[0], norms[1]) if norms else (None, None)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, num_tokens, hidden_size] -> the same shape, and None for attention weights."""
        x, positions, rope = hidden_states[0].contiguous(), _positions.get(), self.attn.rope(self.q_norm, self.k_norm)
        if self.attn.should_project(self.qkv_proj, len(x), rope):
            out = self.attn.attend(self.attn.project(x, self.qkv_proj, rope, positions))
        else:
            out = self.attn(self.qkv_proj.multiply(x)[0], rope, positions)
        return self.o_proj.multiply(out)[0][None], None


def merged(linears: list[nn.Linear]) -> DenseWeight:
    """Merge linear layers of one input into one product."""
    if len(linears) == 1:
        return dense_weight(linears[0].weight, linears[0].bias)
    weight = torch.cat([linear.weight.data for linear in linears])
    # The replaced layers still exist for a while, and would keep their memory.
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    if all(linear.bias is None for linear in linears):
        return dense_weight(weight, None)
    biases = torch.cat([_bias_of(linear) for linear in linears])
    for linear, part in zip(linears, biases.split([linear.out_features for linear in linears]), strict=True):
        if linear.bias is not None:
            linear.bias.data = part
    return dense_weight(weight, biases)


def _bias_of(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.data


def norm_factor(norm: nn.Module, like: torch.Tensor) -> torch.Tensor:
    """Return the factor of an RMS norm, [size] float32."""
    ones = torch.ones(1, 1, len(like), device=like.device)
    factor: torch.Tensor = copy.deepcopy(norm).float()(ones * 1e4)[0, 0]
    return factor


def dense_weight(values: torch.Tensor, bias: torch.Tensor | None) -> DenseWeight:
    """Return a weight with these values, [out_features, in_features], and bias, [out_features], without a copy."""
    out_features, in_features = values.shape
    with torch.device("meta"):
        weight = DenseWeight(MatrixShard({None: Shard.whole(out_features)}, Shard.whole(in_features)), bias is not None)
    weight.values = nn.Parameter(values, requires_grad=False)
    if bias is not None:
        weight.bias = nn.Parameter(bias, requires_grad=False)
    return weight
