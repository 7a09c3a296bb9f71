"""The base class of layers that keep a state of fixed size of each sequence, instead of keys and values.

All begin with a short convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import StateSpec
from nanovllm.attention.metadata import get_step_metadata
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Stream
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.kernels.mixers.causal_conv import CausalConv
    from nanovllm.kernels.mixers.recurrence import Recurrence
    from nanovllm.kernels.mixers.states import StateTensor


class ConvFilters(LoadableModule):
    """The filters of a convolution of each channel: weight, [channels of this rank, 1, width], and maybe a bias."""

    def __init__(self, parts: Mapping[str | None, Shard], width: int, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = MatrixShard(parts, Shard.whole(width))
        self.channels, self.width = self.shard.size
        self.weight = nn.Parameter(torch.empty(self.channels, 1, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.channels), requires_grad=False) if has_bias else None

    @override
    def weight_slices(self, name: str) -> Slices:
        slices: Slices = {}
        for part, channels, place in self.shard.projections():
            shards = channels, Shard.whole(1), self.shard.inputs
            slices[WeightTarget(f"{name}.weight", part)] = WeightSlice.of(shards, place.of(self.weight.data))
        if self.bias is not None:
            for part, channels, place in self.shard.projections():
                slices[WeightTarget(f"{name}.bias", part)] = WeightSlice.of((channels,), place.of(self.bias.data))
        return slices


class StateLayer(nn.Module, ABC):
    """A layer that keeps a state of each sequence, as the runner sees it.

    Attributes:
        slice_size: float32 elements that kernels read from one part of a block, at multiples of this number.
        num_drafts: of a row of the engine, at most.
        kept_size: elements that the recurrence reads of a token.
        kept: in engines with drafts, [num_slots + 1, 2 * (1 + num_drafts), kept_size]; see `StateRows`.
        conv1d: filters of the convolution, and has_silu: whether SiLU follows.
        conv, states: the convolution and the tensors of `state_spec`, between `bind` and `unbind`.
        o_proj: the last product.
    """

    slice_size = 1
    num_drafts = kept_size = 0
    kept: torch.Tensor | None = None
    has_silu = True
    conv1d: ConvFilters
    conv: CausalConv
    states: Mapping[str, StateTensor]
    o_proj: RowParallelLinear

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the layer's state; dtype: of the activations."""
        return {"conv": ((self.conv1d.width + self.num_drafts, self.conv1d.channels), dtype)}

    @abstractmethod
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        """Mix the tokens of `norm(x + residual)`; return the input of `o_proj`, and the residual that it adds to."""

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None, positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Stream:  # fmt: skip
        """Return the mixed tokens of `norm(x + residual)`, and the residual to add them to, of `rows`, or of all."""
        out, residual = self.mix(x, norm, residual)
        if rows is not None:
            out, residual = out[rows], None if residual is None else residual[rows]
        return self.o_proj(out, residual)

    def bind(self, pool: torch.Tensor, places: Mapping[str, int]) -> None:
        """Give the layer the memory of states; ValueError if blocks are too small for it.

        pool: see `StateTensor`, in bytes; places: where the tensors of the layer's spec begin in a state, in elements.
        """
        if pool.is_cuda and pool.view(torch.float32).shape[2] % self.slice_size:
            raise ValueError("kvcache_block_size is too small: a row of a state would lie in two parts of a block")
        from nanovllm.kernels.mixers.causal_conv import CausalConv  # noqa: PLC0415
        from nanovllm.kernels.mixers.states import StateTensor  # noqa: PLC0415

        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        tensors = self.state_spec(weight.dtype)
        self.states = {
            name: StateTensor(pool.view(dtype), places[name], shape) for name, (shape, dtype) in tensors.items()
        }
        self.conv = CausalConv(weight, bias, self.states["conv"], self.has_silu)

    def unbind(self) -> None:
        """Take from the layer what `bind` gave it."""
        del self.conv, self.states

    def keep_drafts(self, num_drafts: int, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare for rows with drafts, and allocate `kept`, if it is needed; dtype: of the activations."""
        self.num_drafts = num_drafts
        if num_drafts and self.kept_size:
            # Tokens of this step and of the previous one.
            self.kept = torch.zeros(num_slots + 1, 2 * (1 + num_drafts), self.kept_size, dtype=dtype, device=device)

    def run(self, op: CausalConv | Recurrence, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `op.step` for the decode rows among a step's tokens, and of `op.prompt` for its chunks.

        inputs: [num_tokens, ...] each, the op's arguments before the rows or the tiles.
        """
        metadata, outs = get_step_metadata(), list[torch.Tensor]()
        num_row_tokens = metadata.num_row_tokens
        step: Callable[..., torch.Tensor] = op.step
        prompt: Callable[..., torch.Tensor] = op.prompt
        if num_row_tokens:
            outs.append(step(*(x[:num_row_tokens] for x in inputs), metadata.state_rows))
        if num_row_tokens < len(inputs[0]):
            outs.append(prompt(*(x[num_row_tokens:] for x in inputs), metadata.state_tiles))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
