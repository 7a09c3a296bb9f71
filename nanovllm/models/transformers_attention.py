"""Attention functions for transformers models: over the paged KV cache, or for a probe.

transformers looks up attention functions and mask functions by a name in the config. Two names are ours. With `PROBED`
some tokens are run through a model at loading, and each call of attention creates a layer of this library from its
arguments. Steps run with `PAGED`, which has no mask function, so that transformers makes no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm.attention.metadata import get_step_metadata
from nanovllm.kernels.attention.options import AttentionOptions
from nanovllm.kernels.qkv_rope_store import store_kv
from nanovllm.layers.attention import CachedAttention

PAGED, PROBED = "nanovllm_paged", "nanovllm_probed"
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
"""Arguments of attention functions without effect here; `is_causal` only says whether there is a mask."""
_GRID = 1 << 20
"""Number of positions at which a mask is evaluated."""


class PagedAttention(CachedAttention):
    """Attention of one layer whose queries and keys are already normalised and rotated.

    key, value: example tensors, [1, num_kv_heads, num_tokens, size]; scale, options: see `AttentionLayer`.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, scale: float, options: AttentionOptions) -> None:
        super().__init__(key.shape[1], key.shape[3], value.shape[3], scale, options)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query, key, value: [1, heads, num_tokens, size] -> [1, num_tokens, num_heads, value_size]."""
        step, pages = get_step_metadata(), self.layer.pages
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if key.stride(2) != 1 or value.stride(2) != 1:
            key, value = key.contiguous(), value.contiguous()
        store_kv(key, value, pages, step.slot_mappings[self.layer.group])
        query = query.to(value.dtype if pages.scales is not None else pages.k_cache.dtype).contiguous()
        out = self.backend.run(query, self.layer, step)
        assert isinstance(out, torch.Tensor)
        return out[None]


@dataclass
class Probe:
    """Records the attention calls of one run of a model.

    Attributes:
        makes_layers: whether to create the layers; otherwise they exist.
        answers: makes attention's output of a given size.
        modules: the attention modules.
        tensors: queries, keys and values of each module, [num_tokens, heads, size] float32, of all rows.
        settings: scale, window and softcap of each module.
        masks: the masks made, with their windows.
        answered: outputs of attention, [rows, num_tokens, heads, size].
    """

    makes_layers: bool
    answers: Callable[..., torch.Tensor] = torch.zeros
    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    settings: list[tuple[float | None, int | None, float | None]] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    answered: list[torch.Tensor] = field(default_factory=list)


_probe: ContextVar[Probe | None] = ContextVar("probe", default=None)


@contextmanager
def probing(*, makes_layers: bool, answers: Callable[..., torch.Tensor] = torch.zeros) -> Iterator[Probe]:
    """Inside the `with` block, record the calls of attention, which returns the tensors that `answers` makes."""
    probe = Probe(makes_layers, answers)
    token = _probe.set(probe)
    try:
        yield probe
    finally:
        _probe.reset(token)


def noise_of(indices: torch.Tensor, num_tokens: int) -> Callable[..., torch.Tensor]:
    """Return a function that makes noise as attention's output, which depends only on the token's index.

    indices: below `num_tokens`, of one row of tokens or of several.
    """

    def answer(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(0)
        noise = torch.randn(num_tokens, *size[2:], generator=generator, device=device)
        return noise[torch.atleast_2d(indices)].to(dtype)

    return answer


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention for `module`, with transformers' interface of attention functions."""
    probe = _probe.get()
    if probe is None:
        paged: PagedAttention = module.paged  # type: ignore[assignment]
        return paged(query, key, value), None
    name = type(module).__name__
    if module in probe.modules:
        raise ValueError(f"{name} attends twice with one set of weights")
    probe.modules.append(module)
    probe.tensors += (x.transpose(1, 2).flatten(0, 1).float() for x in (query, key, value))
    probe.settings.append((scaling, sliding_window, softcap))
    if probe.makes_layers:
        unknown = sorted(argument for argument, given in kwargs.items() if given is not None)
        if unknown := [argument for argument in unknown if argument not in _HARMLESS]:
            raise ValueError(f"{name} asks attention for {unknown}")
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{name} is not causal")
        if key.shape[2] != query.shape[2]:
            raise ValueError(f"{name} has {key.shape[2]} keys for {query.shape[2]} tokens")
        window = _window_of(attention_mask, query.shape[2], name)
        if window is None and sliding_window is not None:
            raise ValueError(f"{name} has a sliding_window={sliding_window}, but its mask has none")
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        module.paged = PagedAttention(key, value, scale, AttentionOptions(window, softcap, s_aux))
    size = len(query), query.shape[2], query.shape[1], value.shape[3]
    probe.answered.append(probe.answers(size, dtype=query.dtype, device=query.device))
    return probe.answered[-1], None


def _window_of(mask: torch.Tensor | None, num_tokens: int, name: str) -> int | None:
    """Return the window of the mask that an attention module got."""
    probe = _probe.get()
    for known, window in [] if probe is None else probe.masks:
        if mask is not None and known.data_ptr() == mask.data_ptr() and torch.equal(mask, _causal(num_tokens, mask)):
            return window
    raise ValueError(f"the attention mask of {name} is not one of transformers' masking_utils")


def _causal(num_tokens: int, like: torch.Tensor | None = None) -> torch.Tensor:
    device = None if like is None else like.device
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()[None, None]


def _make_mask(*, mask_function: Callable[..., Any], device: torch.device | None = None, **sizes: Any) -> torch.Tensor:
    """Make a mask for a probe and record its window, with transformers' interface of mask functions."""
    probe = _probe.get()
    assert probe is not None
    window = _window(lambda q, kv: torch.as_tensor(mask_function(0, 0, q, kv)).broadcast_to(kv.shape))
    mask = _causal(sizes["kv_length"]).to(device or sizes.get("cache_position", torch.empty(0)).device)
    probe.masks.append((mask, window))
    return mask


def _window(visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int | None:
    """Return the sliding window of a mask; None if it is causal; raise a `ValueError` if it is neither.

    visible: maps a query's position and key positions to the keys that the query sees.
    """
    keys = torch.arange(_GRID)
    try:
        window = int(visible(torch.tensor(_GRID - 1), keys).sum())
    except IndexError as error:
        raise ValueError("an attention mask depends on the tokens of a row") from error
    for position in (0, 1, window - 1, window, window + 1, 3 * window // 2, _GRID // 2, _GRID - 1):
        query = torch.tensor(min(max(position, 0), _GRID - 1))
        if not torch.equal(visible(query, keys), (keys <= query) & (keys > query - window)):
            raise ValueError("an attention mask is neither causal nor a sliding window")
    return None if window == _GRID else window


for _name in (PAGED, PROBED):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _make_mask)
