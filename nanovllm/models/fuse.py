"""Replaces modules of a transformers model by modules with this library's kernels, of the same signature.

A module is recognised not by its name but by comparing it with the op on random numbers of several magnitudes in
float32: an RMS norm, a SwiGLU MLP, and attention with one product for queries, keys and values, optional norms of heads
and rotary embedding. Other modules stay, except that plain linear layers get our kernel.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from nanovllm.kernels.gates import silu_and_mul_ref
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope, qkv_rope_store_ref
from nanovllm.kernels.rms_norm import rms_norm, rms_norm_ref
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.transformers_attention import PagedAttention, probing
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import DenseWeight, MatrixShard, Weight

NUM_ROWS = 8
"""Number of random rows for comparing a module with an op."""
_SCALES = (1.0, 30.0, 1e3)
"""Standard deviations of these rows: some modules clamp, which shows only with large numbers."""
_TOLERANCE = 1e-4
_ERRORS_OF_OTHERS = RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError
"""Errors of a module that expects other inputs than rows of its parameters' width."""


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
    sizes, bias = [linear.out_features for linear in linears], None
    weight = torch.cat([linear.weight.data for linear in linears])
    # The replaced layers' parameters become views, to free memory and since updates are written to them.
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = part
    if any(linear.bias is not None for linear in linears):
        bias = weight.new_zeros(len(weight))
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            if linear.bias is not None:
                linear.bias.data = part.copy_(linear.bias.data)
    return dense_weight(weight, bias)


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


def fuse(model: nn.Module, run: Callable[[], Any], max_model_len: int) -> Counter[str]:
    """Replace the modules of a model that have an equivalent of ours; return the number of each class.

    Its attention modules have a `PagedAttention` each; `run` runs it on `NUM_ROWS` tokens, with a probe.
    """
    calls, rotaries = record_calls(model, run), dict[int, RotaryEmbedding | None]()
    # Some modules are never called, such as lists of modules.
    called = {call.module for call in calls}
    _replace(model, partial(_as_attention, calls, rotaries, max_model_len), called)
    for match in (_as_mlp, _as_norm):
        _replace(model, match, called - {call.module for call in calls if not call.is_unary})
    fuse_linears(model)
    ours = (FusedLinear, FusedNorm, FusedMLP, FusedAttention)
    return Counter(type(module).__name__ for module in model.modules() if isinstance(module, ours))


def fuse_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model."""
    # Subclasses may compute something else.
    linears = {module for module in model.modules() if type(module) is nn.Linear}
    _replace(model, lambda module: FusedLinear(cast("nn.Linear", module)), linears)


def _replace(model: nn.Module, match: Callable[[nn.Module], nn.Module | None], among: Set[nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if name and module in among and (fused := match(module)) is not None:
            # The parent module may read attributes, such as whether there is a window.
            for key, value in vars(module).items():
                if not key.startswith("_") and not hasattr(fused, key):
                    setattr(fused, key, value)
            model.set_submodule(name, fused)


@dataclass(frozen=True)
class Call:
    """A call of a module, and what it returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def is_unary(self) -> bool:
        """Whether it took one positional tensor, and returned one."""
        are_tensors = all(isinstance(x, torch.Tensor) for x in (*self.args, self.output))
        return len(self.args) == 1 and not self.kwargs and are_tensors


def record_calls(model: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """Return the calls of a model's modules while it runs, each after those inside it."""
    calls: list[Call] = []
    handles = [
        module.register_forward_hook(lambda *call: calls.append(Call(*call)), with_kwargs=True)
        for module in model.modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _as_norm(module: nn.Module) -> FusedNorm | None:
    """Return a module as an RMS norm if it is equivalent to y = factor * x / sqrt(mean(x * x) + eps)."""
    params = list(module.parameters())
    if len(params) != 1 or params[0].dim() != 1 or next(module.children(), None) is not None:
        return None
    dtype, like = params[0].dtype, params[0]
    norm = copy.deepcopy(module).float()

    def outputs(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = norm(x[None])[0]
        return out

    try:
        factor = norm_factor(module, like)
        ones = torch.ones(1, len(like), device=like.device)
        ratio = (outputs(ones * 1e-3)[0] / factor)[factor != 0].double().median()
        eps = max(0.0, 1e-6 * (ratio.item() ** -2 - 1))
        for scale in _SCALES:
            x = scale * _random(NUM_ROWS, len(like), like=like)
            x[0] *= 1e-3
            # An outlier with a large normalised value.
            x[1, 0] *= 1e3
            if not are_close(outputs(x), rms_norm_ref(x, factor, eps)[0]):
                return None
    except _ERRORS_OF_OTHERS:
        return None
    rounded = factor.to(dtype)
    return FusedNorm(rounded if torch.equal(rounded.float(), factor) else factor, eps, module)


def _as_mlp(module: nn.Module) -> FusedMLP | None:
    """Return a module as a SwiGLU MLP if it is equivalent to one of two or three linear layers."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    has_more = len(list(module.parameters())) != sum(len(list(linear.parameters())) for linear in linears)
    if len(linears) not in (2, 3) or has_more:
        return None
    down = next((linear for linear in linears if linear.out_features == linears[0].in_features), linears[-1])
    others = [linear for linear in linears if linear is not down]
    # Gated products do not support biases.
    are_gated = sum(linear.out_features for linear in others) == 2 * down.in_features
    if not are_gated or any(linear.bias is not None for linear in others):
        return None
    copied = copy.deepcopy(module).float()
    for gate_up in (others, others[::-1]):
        if all(_is_swiglu(copied, gate_up, down, scale) for scale in _SCALES):
            return FusedMLP(merged(gate_up), dense_weight(down.weight, down.bias))
    return None


def _is_swiglu(module: nn.Module, gate_up: list[nn.Linear], down: nn.Linear, scale: float) -> bool:
    """Return whether a module, in float32, equals the SwiGLU MLP of these linear layers on inputs of a given scale."""
    x = scale * _random(NUM_ROWS, gate_up[0].in_features, like=down.weight)
    try:
        out = module(x[None])[0]
    except _ERRORS_OF_OTHERS:
        return False
    gated = silu_and_mul_ref(torch.cat([_linear(x, linear) for linear in gate_up], dim=-1))
    return are_close(out, _linear(gated, down))


def _as_attention(
    calls: list[Call], rotaries: dict[int, RotaryEmbedding | None], max_model_len: int, module: nn.Module
) -> FusedAttention | None:
    """Return a module as attention with one product if it applies norms and RoPE as `qkv_rope_store` does."""
    paged = getattr(module, "paged", None)
    if not isinstance(paged, PagedAttention) or paged.key_size != paged.value_size:
        return None
    if paged.key_size.bit_count() != 1:
        # `qkv_rope_store` does not support them.
        return None
    members = set(module.modules())
    *inner, call = (call for call in calls if call.module in members)
    hidden = call.kwargs.get("hidden_states", call.args[0] if call.args else None)
    angles = call.kwargs.get("position_embeddings")
    is_pair = isinstance(call.output, tuple) and len(call.output) == 2
    if hidden is None or not isinstance(angles, tuple) or not is_pair:
        return None
    linears = [(other.module, other.args[0] is hidden) for other in inner if isinstance(other.module, nn.Linear)]
    qkv_projs = [linear for linear, takes_hidden in linears if takes_hidden]
    o_projs = [linear for linear, takes_hidden in linears if not takes_hidden]
    norms = [norm for other in inner if (norm := _as_norm(other.module)) and len(norm.weight) == paged.key_size]
    if id(angles) not in rotaries:
        source = next((other for other in calls if other.output is angles), None)
        rotaries[id(angles)] = _rotary_of(source, max_model_len)
    rotary = rotaries[id(angles)]
    if len(qkv_projs) not in (1, 3) or len(o_projs) != 1 or len(norms) not in (0, 2) or rotary is None:
        return None
    match = _AttentionMatch(call, qkv_projs, o_projs[0], norms, rotary, paged)
    return match.fused() if match.is_equal() else None


@dataclass(frozen=True)
class _AttentionMatch:
    """An attention module's call, and its presumed parts; one or three `qkv_projs`, no or two `norms`."""

    call: Call
    qkv_projs: list[nn.Linear]
    o_proj: nn.Linear
    norms: list[FusedNorm]
    rotary: RotaryEmbedding
    paged: PagedAttention

    def is_equal(self) -> bool:
        """Return whether queries, keys, values and the output projection equal ours."""
        kv_heads, size = self.paged.num_kv_heads, self.paged.key_size
        num_outputs = sum(linear.out_features for linear in self.qkv_projs)
        if size != self.rotary.cos_sin.shape[1] or num_outputs != self.o_proj.in_features + 2 * kv_heads * size:
            return False
        module = copy.deepcopy(self.call.module).float()
        x = _random(NUM_ROWS, self.qkv_projs[0].in_features, like=self.o_proj.weight)
        return all(self._is_equal_at(scale, module, scale * x) for scale in _SCALES)

    def _is_equal_at(self, scale: float, module: nn.Module, x: torch.Tensor) -> bool:
        """Compare `module`, the call's in float32, on an input and attention outputs of a given scale."""
        table = self.rotary.cos_sin
        qkv = torch.cat([_linear(x, linear) for linear in self.qkv_projs], dim=-1).unflatten(1, (-1, table.shape[1]))
        positions = torch.arange(NUM_ROWS, device=x.device) * (len(table) - 1) // (NUM_ROWS - 1)
        angles = tuple(half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=-1))
        kwargs = {
            key: positions.view_as(given) if _is_positions(given) else given for key, given in self.call.kwargs.items()
        }
        kwargs["position_embeddings"] = angles
        kwargs, args = (kwargs | {"hidden_states": x[None]}, ()) if not self.call.args else (kwargs, (x[None],))

        def noise(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return scale * _random(*size, like=x).to(device, dtype)

        with probing(makes_layers=False, answers=noise) as probe:
            out = module(*args, **kwargs)[0][0]
        query, key, value = probe.tensors
        pages = KVPages(torch.empty_like(key)[None], torch.empty_like(value)[None])
        norms = (self.norms[0].weight.float(), self.norms[1].weight.float()) if self.norms else None
        eps = self.norms[0].eps if self.norms else 0.0
        slots = torch.arange(NUM_ROWS, device=x.device, dtype=torch.int32)
        ours = qkv_rope_store_ref(qkv, NormRope(norms, eps, table), positions, pages, slots)
        pairs = [(query, ours), (key, pages.k_cache[0]), (value, pages.v_cache[0])]
        pairs.append((out, _linear(probe.answered[0][0].flatten(1), self.o_proj)))
        return all(are_close(theirs, mine) for theirs, mine in pairs)

    def fused(self) -> FusedAttention:
        """Return the module with our kernels."""
        eps = self.norms[0].eps if self.norms else 0.0
        attn = Attention(self.paged.num_kv_heads, self.paged.key_size, eps, self.rotary, self.paged.options)
        attn.scale = self.paged.scale
        return FusedAttention(
            merged(self.qkv_projs), dense_weight(self.o_proj.weight, self.o_proj.bias), self.norms, attn
        )


def _rotary_of(call: Call | None, max_model_len: int) -> RotaryEmbedding | None:
    """Return a table for the module that made cosines and sines; None if these are not by halves of heads."""
    if call is None:
        return None

    def in_float32(given: Any) -> Any:
        if _is_positions(given):
            return torch.arange(max_model_len, device=given.device)[None]
        return given.float() if isinstance(given, torch.Tensor) else given

    kwargs = {key: in_float32(given) for key, given in call.kwargs.items()}
    cos, sin = (x[0] for x in call.module(*map(in_float32, call.args), **kwargs))
    if cos.shape[0] != max_model_len:
        return None
    half = cos.shape[-1] // 2
    if not torch.equal(torch.cat((cos[:, :half],) * 2, -1), cos):
        return None
    rotary = RotaryEmbedding(cos.shape[-1], None)
    rotary.cos_sin = torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float().contiguous()
    return rotary


def _is_positions(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.dtype == torch.int64 and given.numel() == NUM_ROWS


def _random(*shape: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like.device)


def are_close(x: torch.Tensor, y: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two tensors of floats are equal but for rounding."""
    return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(x.std().item(), 1e-6))


def _linear(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    return functional.linear(x, linear.weight.float(), None if linear.bias is None else linear.bias.float())
