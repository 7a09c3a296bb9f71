"""Maps checkpoint tensors to module parameters, and to this rank's slice of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn

from nanovllm.kernels import ops
from nanovllm.parallel.shard import Shard

if TYPE_CHECKING:
    from nanovllm.kernels.policy import KernelPolicy

Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Stored dtypes that may be converted to the model's, chosen by the user or for the CPU."""


class WeightTarget(NamedTuple):
    """The destination of a checkpoint tensor: a parameter by its name, or a projection or expert stacked in it."""

    param: str
    part: str | None = None
    expert: int | None = None

    def __str__(self) -> str:
        labels = [str(label) for label in (self.part, self.expert) if label is not None]
        return f"{self.param}[{', '.join(labels)}]" if labels else self.param


@dataclass(frozen=True)
class WeightSlice:
    """This rank's slice of one checkpoint tensor.

    Attributes:
        shape: of the whole tensor.
        index: one slice per dimension.
        region: its storage: a parameter, or a region of one.
        factor: what floats are multiplied by when they are stored; e4m3 has it in its scales.
        outputs_dim: dimension in which several projections may follow one another; None if they share the tensor.
        dtypes: dtypes that the tensor may be stored in.
        shapes: other shapes that it may have.
        check: rejects values, given the tensor's name and a part of it; None if all can be stored.
        convert: from the checkpoint's values to the region's; None if these are the same but for their dtype.
        is_used: whether values are stored, or only checked.
        is_plain: whether `store` copies values, but for `convert` and `factor`.
    """

    is_plain: ClassVar[bool] = True

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    region: torch.Tensor
    _: KW_ONLY
    factor: float = 1.0
    outputs_dim: int | None = 0
    dtypes: tuple[torch.dtype, ...] = FLOATS
    shapes: tuple[tuple[int, ...], ...] = ()
    check: Callable[[str, torch.Tensor], None] | None = None
    convert: Convert | None = None
    is_used: bool = True

    @classmethod
    def of(cls, shards: Iterable[Shard], region: torch.Tensor) -> WeightSlice:
        """Return the slice of one shard per dimension; `region` also holds the padding."""
        shape, index = [], []
        for dim, shard in enumerate(shards):
            shape.append(shard.total)
            index.append(shard.present)
            region = region.narrow(dim, 0, shard.num_present)
        return cls(tuple(shape), tuple(index), region)

    def in_float32(self, offset: float = 0.0) -> WeightSlice:
        """Return the slice of a tensor that is kept in float32, whatever the model's dtype, with an offset added."""
        return replace(self, convert=lambda values: values.float() + offset)

    @property
    def has_model_dtype(self) -> bool:
        """Whether the region has the tensor's floats, in the model's dtype."""
        return self.is_plain and self.dtypes == FLOATS and self.convert is None and self.is_used

    @property
    def places(self) -> tuple[WeightSlice, ...]:
        """The slices of the same tensor that this rank stores: this one, and slices of modules tied to it."""
        return (self,)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Reject a tensor whose dtype is not in `dtypes`."""
        if dtype not in self.dtypes:
            raise ValueError(f"tensor {name!r} is stored as {dtype}; the config asks for one of {self.dtypes}")

    def check_shape(self, name: str, shape: list[int]) -> None:
        """Reject a tensor of another shape."""
        if tuple(shape) not in (self.shape, *self.shapes):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(self.shape)}")

    def check_values(self, name: str, tensor: Any) -> None:
        """Reject values that `store` rejects; `tensor` is read only if some can be rejected."""
        if self.check is not None:
            self.check(name, tensor[()])

    def store(self, name: str, values: torch.Tensor) -> None:
        """Store a slice of the tensor `name`, on the region's device, converting its dtype if both are floats."""
        self.check_values(name, values)
        if self.is_used:
            self.region.copy_(self.scaled(values if self.convert is None else self.convert(values)))

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Return floats times the factor, in float32 if there is one; other values as they are."""
        return values if self.factor == 1 or values.dtype not in FLOATS else values.float() * self.factor


Slices: TypeAlias = dict[WeightTarget, WeightSlice]
"""This rank's slice of each tensor."""


class LoadableModule(nn.Module):
    """A module that builds its parameters from checkpoint tensors; `policy` chooses its kernels."""

    param_dtype: torch.dtype | None = None
    """Of its parameters; None for the dtype of the model's activations."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: KernelPolicy = ops.FASTEST

    @property
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        """Numbers of rows, and of prompt tokens beside decode rows, at which the choice of kernels or tiles changes.

        The latter go as far as engines of few sequences reach.
        """
        return (), ()

    def weight_slices(self, name: str) -> Slices:
        """Return this rank's slice of each tensor of the module `name`; by default whole parameters."""
        return {
            WeightTarget(f"{name}.{param_name}"): WeightSlice.of(map(Shard.whole, param.shape), param.data)
            for param_name, param in self.named_parameters(recurse=False)
        }

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the parameters, not yet filled; `dtype` is the dtype of the model's activations."""
        dtype = self.param_dtype or dtype
        for name, param in list(self.named_parameters(recurse=False)):
            # For a tensor without memory, `empty_like` imports sympy, which takes as long as loading a small model.
            values = torch.empty(param.shape, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(values, requires_grad=False))


class LoadableVector(LoadableModule):
    """A tensor of one dimension, whose name in checkpoints is the module's own.

    shard: this rank's items; dtype: float32, or int64, or None for the dtype of the model's activations.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.shard, self.param_dtype = shard, dtype
        self.values = nn.Parameter(torch.empty(shard.size, dtype=dtype), requires_grad=False)

    def weight_slices(self, name: str) -> Slices:
        """Return this rank's slice of the tensor; integers may be stored in 32 bits."""
        part = WeightSlice.of((self.shard,), self.values.data)
        if self.param_dtype == torch.float32:
            part = part.in_float32()
        elif self.param_dtype is not None:
            part = replace(part, dtypes=(torch.int64, torch.int32))
        return {WeightTarget(name): part}
