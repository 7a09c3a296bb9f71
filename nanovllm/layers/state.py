"""The base classes of layers that keep a state of fixed size of each sequence, instead of keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.attention.kv_cache_spec import State
from nanovllm.attention.metadata import get_step_metadata
from nanovllm.kernels.mixers.causal_conv import ConvState
from nanovllm.kernels.mixers.recurrence import Recurrence
from nanovllm.kernels.mixers.states import StatePool
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Stream
from nanovllm.weights.slices import Float32Slice, LoadableModule, WeightSlice, WeightTarget


class ConvFilters(LoadableModule):
    """The filters of a convolution of each channel: weight, [channels of this rank, 1, width], and maybe a bias."""

    def __init__(self, parts: Mapping[str | None, Shard], width: int, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = MatrixShard(parts, Shard.whole(width))
        self.channels, self.width = self.shard.size
        self.weight = nn.Parameter(torch.empty(self.channels, 1, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.channels), requires_grad=False) if has_bias else None

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        slices = {
            WeightTarget(f"{name}.weight", part): WeightSlice.of((channels, Shard.whole(1), self.shard.inputs), region)
            for part, channels, region in self.shard.split(self.weight.data)
        }
        if self.bias is not None:
            for part, channels, region in self.shard.split(self.bias.data):
                slices[WeightTarget(f"{name}.bias", part)] = WeightSlice.of((channels,), region)
        return slices


class StateLayer(nn.Module, ABC):
    """A layer that keeps a state of each sequence, as the runner sees it.

    Attributes:
        conv1d: the filters of its convolution.
        conv: where inputs of the convolution are kept, between `bind` and `unbind`.
        slice_size: float32 elements that kernels read from one part of a block, at multiples of this number.
        num_drafts: of a row of the engine, at most.
        kept_size: elements that the recurrence reads of a token.
        kept: in engines with drafts, [num_slots + 1, 2 * (1 + num_drafts), kept_size]; see `StateRows`.
        o_proj: the last product.
    """

    conv1d: ConvFilters
    conv: ConvState
    slice_size = 1
    num_drafts = kept_size = 0
    kept: torch.Tensor | None = None
    o_proj: RowParallelLinear

    def state_spec(self, dtype: torch.dtype) -> State:
        """Return what the layer keeps of each sequence; dtype: of the activations."""
        return State({"conv": ((self.conv1d.width + self.num_drafts, self.conv1d.channels), dtype)})

    @abstractmethod
    def mix(self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None) -> Stream:
        """Mix the tokens of `norm(x + residual)`; return the input of `o_proj`, and the residual that it adds to."""

    def forward(
        self,
        x: torch.Tensor,
        norm: AllReduceRMSNorm | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Stream:
        """Return the mixed tokens of `norm(x + residual)`, and the residual to add them to, of `rows`, or of all."""
        out, residual = self.mix(x, norm, residual)
        if rows is not None:
            out, residual = out[rows], None if residual is None else residual[rows]
        return self.o_proj(out, residual)

    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        """Give the layer the memory of states.

        places: where the layer's tensors begin in a state, in elements of each one's dtype, by the names of its spec.

        Raises:
            ValueError: blocks are too small for the layer.
        """
        if pool.elements.is_cuda and pool.view(torch.float32).elements.shape[2] % self.slice_size:
            raise ValueError("kvcache_block_size is too small: a row of a state would lie in two parts of a block")
        self.conv = ConvState(pool.view(self.conv1d.weight.dtype), places["conv"], self.conv1d.width + self.num_drafts)

    def unbind(self) -> None:
        """Take from the layer what `bind` gave it."""
        del self.conv

    def keep_tokens(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `kept`, if it is needed; dtype: of the activations."""
        if self.num_drafts and self.kept_size:
            # A step's own tokens, beside the ones of the step before.
            entries = 2 * (1 + self.num_drafts)
            self.kept = torch.zeros(num_slots + 1, entries, self.kept_size, dtype=dtype, device=device)

    def run(
        self, inputs: Sequence[torch.Tensor], step: Callable[..., torch.Tensor], prompt: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return the outputs of `step` for the decode rows among a step's tokens, and of `prompt` for its chunks.

        inputs: [num_tokens, size] each. The functions take the inputs of some tokens, and the rows or the tiles of
        `StateMetadata`.
        """
        metadata, outs = get_step_metadata(), list[torch.Tensor]()
        states, num_row_tokens = metadata.states, metadata.num_row_tokens
        assert states is not None
        if num_row_tokens:
            outs.append(step(*(x[:num_row_tokens] for x in inputs), states.rows))
        if num_row_tokens < len(inputs[0]):
            outs.append(prompt(*(x[num_row_tokens:] for x in inputs), states.tiles))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class RecurrentLayer(StateLayer, LoadableModule):
    """A layer with a recurrence of heads after the convolution.

    Attributes:
        heads: of this rank; each has an element of `HEAD_PARAMS`, parameters that are kept in float32 and have the
            names that they have in checkpoints.
        state_shape: of a sequence's state, see `Recurrence`.
        recurrence: the layer as kernels take it, between `bind` and `unbind`.
    """

    HEAD_PARAMS: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    heads: Shard
    state_shape: tuple[int, int, int]
    recurrence: Recurrence

    def make_head_params(self) -> None:
        """Create the parameters of heads."""
        for name in self.HEAD_PARAMS:
            setattr(self, name, nn.Parameter(torch.empty(self.heads.size), requires_grad=False))

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {
            WeightTarget(f"{name}.{param}"): Float32Slice.of((self.heads,), getattr(self, param).data)
            for param in self.HEAD_PARAMS
        }

    @override
    def state_spec(self, dtype: torch.dtype) -> State:
        return State({"recurrent": (self.state_shape, torch.float32), **super().state_spec(dtype).tensors})

    @abstractmethod
    def make_recurrence(self, common: Mapping[str, Any]) -> Recurrence:
        """Return the layer as kernels take it; common: arguments that all recurrences have."""

    @override
    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        super().bind(pool, places)
        self.recurrence = self.make_recurrence({
            "conv_weight": self.conv1d.weight.squeeze(1), "conv_bias": self.conv1d.bias, "a_log": self.A_log,
            "dt_bias": self.dt_bias, "conv": self.conv, "pool": pool.view(torch.float32),
            "first": places["recurrent"], "shape": self.state_shape, "kept": self.kept,
        })  # fmt: skip

    @override
    def unbind(self) -> None:
        super().unbind()
        del self.recurrence
