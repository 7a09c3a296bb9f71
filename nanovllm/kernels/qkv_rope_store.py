"""Keys and values into the pages of a cache: as they are, or in one op after the QK norm (Qwen3) and RoPE (Su et al.
2021, arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels._triton import converts_e4m3, jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.e4m3 import E4M3_MAX, to_e4m3
from nanovllm.kernels.fast_math import rsqrt


@dataclass(slots=True)
class NormRope:
    """The RMS norm of each head of queries and keys of a layer, if there is one, and the RoPE after it.

    Attributes:
        norm_weights: of the query norm and of the key norm, [head_dim] each; None for no norm.
        eps: added to the mean square.
        cos_sin: [max_position, rotary_dim] float32; rotary_dim / 2 cosines, then rotary_dim / 2 sines. The first
            rotary_dim elements of a head are rotated.
        has_gates: whether each head of queries is followed by a head of gates of attention's output (`gate_heads`).
    """

    norm_weights: tuple[torch.Tensor, torch.Tensor] | None
    eps: float
    cos_sin: torch.Tensor
    has_gates: bool = False


@dataclass(slots=True)
class KVScales:
    """Scales of a layer's pages in e4m3: each value is multiplied by its KV head's.

    Attributes:
        keys, values: [num_kv_heads] float32.
        num_clipped: [1] int64, shared by all layers; counts values beyond 448 times the scale, which are clipped.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_clipped: torch.Tensor


@dataclass(slots=True)
class KVPages:
    """The KV cache of one layer.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        scales: if these are in e4m3, else None.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: KVScales | None = None

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches as kernels take them, e4m3 as uint8."""
        if self.scales is None:
            return self.k_cache, self.v_cache
        return self.k_cache.view(torch.uint8), self.v_cache.view(torch.uint8)

    @property
    def scaling(self) -> dict[str, Any]:
        """The scales as arguments of kernels that read the pages; none if there are none."""
        if self.scales is None:
            return {}
        scales, native = self.scales, converts_e4m3(self.k_cache.device)
        return {"k_scale_ptr": scales.keys, "v_scale_ptr": scales.values, "NATIVE": native}

    @property
    def store_scaling(self) -> dict[str, Any]:
        """The same of kernels that store into the pages."""
        return {} if self.scales is None else self.scaling | {"clipped_ptr": self.scales.num_clipped}


def store_kv_ref(key: torch.Tensor, value: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Plain torch form of `store_kv`."""
    is_stored, scales = slot_mapping >= 0, pages.scales
    slots = slot_mapping[is_stored]
    scales_of = (None, None) if scales is None else (scales.keys, scales.values)
    for cache, new, scale in zip(pages.stored, (key, value), scales_of, strict=True):
        rows = new[is_stored]
        if scales is None or scale is None:
            rows = rows.to(cache.dtype)
        else:
            scaled = rows.float() / scale[:, None]
            scales.num_clipped += (scaled.abs() > E4M3_MAX).sum()
            rows = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        cache.flatten(0, 1)[slots] = rows


def qkv_rope_store_ref(
    qkv: torch.Tensor, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Plain torch form of `qkv_rope_store`."""
    num_kv_heads = pages.k_cache.shape[2]
    if rope.has_gates:
        num_gated = qkv.shape[1] - 2 * num_kv_heads
        qkv = torch.cat((qkv[:, :num_gated:2], qkv[:, num_gated:]), 1)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    x = qkv[:, : num_heads + num_kv_heads].float()
    if rope.norm_weights is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rope.eps)
        q_weight, k_weight = rope.norm_weights
        x = x * torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))).float()
    cos, sin = rope.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    size = rope.cos_sin.shape[1]
    first, second = x[..., :size].chunk(2, dim=-1)
    x = torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., size:]), dim=-1).to(qkv.dtype)
    store_kv_ref(x[:, num_heads:], qkv[:, num_heads + num_kv_heads :], pages, slot_mapping)
    return x[:, :num_heads].contiguous()


@jit
def quantize_kv(x, scales, mask, clipped_ptr, NATIVE: tl.constexpr):
    """Return bytes of e4m3 that mean x, if multiplied by the scales; counts the clipped ones in `mask`."""
    scaled = x.to(tl.float32) / scales
    num_clipped = tl.sum((mask & (tl.abs(scaled) > 448.0)).to(tl.int32))
    if num_clipped > 0:
        tl.atomic_add(clipped_ptr, num_clipped.to(tl.int64), sem="relaxed")
    return to_e4m3(scaled, NATIVE)


@jit
def _rotation(
    cos_sin_ptr, position, HALF: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Return the pairs of a head's elements, as the first's and the second's, [PADDED] each, and their angles."""
    dims = tl.arange(0, PADDED)
    if ROTARY == 2 * HALF:
        # Halves that are no power of two are padded to one; for others nothing is masked.
        is_dim = None if PADDED == HALF else dims < HALF
        low, high = dims, HALF + dims
        cos = tl.load(cos_sin_ptr + position * (2 * HALF) + dims, mask=is_dim)
        sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + dims, mask=is_dim)
    else:
        turns = dims < ROTARY // 2
        low, high = dims + tl.where(turns, 0, ROTARY // 2), dims + tl.where(turns, ROTARY // 2, HALF)
        if ROTARY % 16 == 0:
            low = tl.max_contiguous(tl.multiple_of(low, 8), 8)
            high = tl.max_contiguous(tl.multiple_of(high, 8), 8)
        cos = tl.load(cos_sin_ptr + position * ROTARY + dims, mask=turns, other=1.0)
        sin = tl.load(cos_sin_ptr + position * ROTARY + ROTARY // 2 + dims, mask=turns, other=0.0)
    return low, high, cos, sin


@jit
def _load_pairs(ptr, low, high, mask):
    return tl.load(ptr + low, mask=mask, other=0.0), tl.load(ptr + high, mask=mask, other=0.0)


@jit
def _store_pairs(ptr, low, high, first, second, mask):
    tl.store(ptr + low, first, mask=mask)
    tl.store(ptr + high, second, mask=mask)


@jit
def _qkv_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slot_mapping_ptr, query_ptr,
    k_cache_ptr, v_cache_ptr, eps, row_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
    ROTARY: tl.constexpr, HAS_GATES: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, clipped_ptr=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED)
    is_dim = None if PADDED == HALF else dims < HALF
    in_head = True if PADDED == HALF else dims[None, :] < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    low, high, cos, sin = _rotation(cos_sin_ptr, position, HALF, PADDED, ROTARY)
    cos, sin = cos[None, :], sin[None, :]
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if q_weight_ptr is not None:
        q_first, q_second = tl.load(q_weight_ptr + low, mask=is_dim), tl.load(q_weight_ptr + high, mask=is_dim)
        k_first, k_second = tl.load(k_weight_ptr + low, mask=is_dim), tl.load(k_weight_ptr + high, mask=is_dim)
    wait_for_previous(PDL)
    mask = (heads < NUM_HEADS + 2 * KV_HEADS)[:, None]
    is_query = (heads < NUM_HEADS)[:, None]
    sources = heads
    if HAS_GATES:
        sources = tl.where(heads < NUM_HEADS, 2 * heads, heads + NUM_HEADS)
    source = qkv_ptr + token * row_stride + sources[:, None] * (2 * HALF)
    raw_first, raw_second = _load_pairs(source, low[None, :], high[None, :], mask & in_head)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if q_weight_ptr is not None:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * tl.where(is_query, q_first[None, :], k_first[None, :]).to(tl.float32)
        second *= scale * tl.where(is_query, q_second[None, :], k_second[None, :]).to(tl.float32)
    dtype = query_ptr.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)

    low, high = (heads * (2 * HALF))[:, None] + low[None, :], (heads * (2 * HALF))[:, None] + high[None, :]
    query = query_ptr + token * (NUM_HEADS * 2 * HALF)
    _store_pairs(query, low, high, rotated_first, rotated_second, is_query & in_head)
    if slot >= 0:
        is_value = (heads >= NUM_HEADS + KV_HEADS)[:, None]
        is_key = mask & (is_query == 0) & (is_value == 0)
        key_first, key_second, value_first, value_second = rotated_first, rotated_second, raw_first, raw_second
        if k_scale_ptr is not None:
            kv_heads = (heads - NUM_HEADS)[:, None]
            scales = tl.load(k_scale_ptr + kv_heads, mask=is_key, other=1.0)
            scales = tl.load(v_scale_ptr + kv_heads - KV_HEADS, mask=mask & is_value, other=scales)
            new_first = tl.where(is_value, raw_first, rotated_first)
            new_second = tl.where(is_value, raw_second, rotated_second)
            key_first = quantize_kv(new_first, scales, is_key | (mask & is_value), clipped_ptr, NATIVE)
            key_second = quantize_kv(new_second, scales, is_key | (mask & is_value), clipped_ptr, NATIVE)
            value_first, value_second = key_first, key_second
        row = slot * (KV_HEADS * 2 * HALF)
        key = k_cache_ptr + row - NUM_HEADS * 2 * HALF
        _store_pairs(key, low, high, key_first, key_second, is_key & in_head)
        value = v_cache_ptr + row - (NUM_HEADS + KV_HEADS) * 2 * HALF
        _store_pairs(value, low, high, value_first, value_second, mask & is_value & in_head)


def qkv_rope_store(
    qkv: torch.Tensor, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Apply QK norm (if there are weights) and RoPE, store keys and values in the pages, and return the queries.

    All inputs but qkv must be written before the kernel queued last (see `pdl_options`). Queries are [num_tokens,
    num_heads, head_dim], contiguous; computed in float32, in qkv's dtype.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], query, key and value heads, rows contiguous, and with
    gates [num_tokens, 2 * num_heads + 2 * num_kv_heads, head_dim]; there may be no queries; positions: [num_tokens]
    int32; slot_mapping: [num_tokens] int32, KV slots, `block * block_size + offset`; -1 stores nothing.
    """
    if not uses_triton(qkv.device):
        return qkv_rope_store_ref(qkv, rope, positions, pages, slot_mapping)
    num_tokens, all_heads, head_dim = qkv.shape
    cos_sin, (k_cache, v_cache) = rope.cos_sin, pages.stored
    num_kv_heads = k_cache.shape[2]
    num_heads = (all_heads - 2 * num_kv_heads) // (2 if rope.has_gates else 1)
    assert qkv.stride()[1:] == (head_dim, 1) and cos_sin.is_contiguous() and positions.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = rope.norm_weights or (None, None)
    heads = 8
    _qkv_rope_store_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, query, k_cache, v_cache, rope.eps, qkv.stride(0),
        NUM_HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS=heads, ROTARY=cos_sin.shape[1], HAS_GATES=rope.has_gates, num_warps=2,
        **pdl_options(qkv.device), **pages.store_scaling,
    )  # fmt: skip
    return query


@jit
def _store(x_ptr, cache_ptr, token, slot, token_stride, head_stride,
           HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
           scale_ptr, clipped_ptr, NATIVE: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HEADS * SIZE
    source = token * token_stride + (offsets // SIZE) * head_stride + offsets % SIZE
    x = tl.load(x_ptr + source, mask=mask, other=0.0)
    if scale_ptr is not None:
        scales = tl.load(scale_ptr + offsets // SIZE, mask=mask, other=1.0)
        x = quantize_kv(x, scales, mask, clipped_ptr, NATIVE)
    tl.store(cache_ptr + slot * (HEADS * SIZE) + offsets, x.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _store_kv_kernel(
    key_ptr, value_ptr, slot_mapping_ptr, k_cache_ptr, v_cache_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, clipped_ptr=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    wait_for_previous(PDL)
    if slot >= 0:
        _store(key_ptr, k_cache_ptr, token, slot, key_token_stride, key_head_stride, HEADS, KEY_SIZE, KEY_BLOCK,
               k_scale_ptr, clipped_ptr, NATIVE)  # fmt: skip
        _store(value_ptr, v_cache_ptr, token, slot, value_token_stride, value_head_stride, HEADS, VALUE_SIZE,
               VALUE_BLOCK, v_scale_ptr, clipped_ptr, NATIVE)  # fmt: skip


def store_kv(key: torch.Tensor, value: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Store the keys and values of a step's tokens in the pages in place, in their dtype.

    `key`, `value`: [num_tokens, num_kv_heads, key_size or value_size], elements of a head contiguous; `slot_mapping`:
    see `qkv_rope_store`, written before the kernel queued last (see `pdl_options`).
    """
    if not uses_triton(key.device):
        return store_kv_ref(key, value, pages, slot_mapping)
    num_tokens, num_heads, key_size = key.shape
    value_size = value.shape[2]
    assert key.stride(2) == value.stride(2) == 1 and slot_mapping.is_contiguous()
    assert pages.k_cache.is_contiguous() and pages.v_cache.is_contiguous()
    k_cache, v_cache = pages.stored
    key_block, value_block = (triton.next_power_of_2(num_heads * size) for size in (key_size, value_size))
    _store_kv_kernel[(num_tokens,)](
        key, value, slot_mapping, k_cache, v_cache,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=num_heads, KEY_SIZE=key_size, VALUE_SIZE=value_size, KEY_BLOCK=key_block, VALUE_BLOCK=value_block,
        num_warps=min(8, max(1, key_block // 512)), **pdl_options(key.device), **pages.store_scaling,
    )  # fmt: skip
    return None
