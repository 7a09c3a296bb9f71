"""Attention by this library's own Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from typing_extensions import override

from nanovllm.attention.backend import AttentionBackend, AttentionLayer, AttentionSetup, CaptureVariant, HostPlan
from nanovllm.attention.cascade import CascadePlanner
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import StepMetadata
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.attention import cascade_attention
from nanovllm.kernels.attention.decode_attention import DecodePlan, decode_attention, plan_decode
from nanovllm.kernels.attention.options import MAX_HEAD_SIZE, AttentionOptions, padded_size
from nanovllm.kernels.attention.prefill_attention import ChunkRows, prefill_attention
from nanovllm.kernels.attention.widen_pages import BLOCK_SIZE, WideTables, plan_wide_tables, widen_pages
from nanovllm.kernels.qkv_rope_store import NormRope

_FEW_TILE, _FEW_PROGRAMS = 64, 3
_MANY_TILE, _MANY_PROGRAMS = 128, 9
_FLOAT32_TILE = 16
_HOPPER_PROGRAMS = 2
"""Tokens per tile of keys and values of 128 elements, and programs per multiprocessor over which contexts are split."""
_LEAST_TILE = 16
_CASCADE_PROGRAMS = 2
"""Programs per multiprocessor for cascade attention."""


class DecodeVariant(NamedTuple):
    """A variant of the kernels of decode rows.

    `uses_cascade`: rows that share a prefix attend to it together. `single_split`: each row's keys are read in a single
    split instead of several (split-KV).
    """

    uses_cascade: bool = False
    single_split: bool = False


@dataclass(frozen=True)
class StepPlan:
    """The plan that all layers of a step share.

    Attributes:
        decodes: plans of decode rows, by the layer's cache spec.
        wide: tables of the pages of 16 bits to which the chunks' contexts are widened; None if they are not.
    """

    decodes: dict[Paged, DecodePlan]
    wide: WideTables | None


class TritonBackend(AttentionBackend):
    """Attention by this library's Triton and Gluon kernels, on a CUDA device."""

    supports_mixed_graph = True

    def __init__(self, setup: AttentionSetup) -> None:
        device, dtype, policy, all_reduce_min = setup.device, setup.dtype, setup.policy, setup.all_reduce_min
        self.policy, self.kernel_rows = policy, policy.attention_rows
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.dtype, self.num_heads = dtype, setup.num_heads
        self._specs = list(dict.fromkeys(setup.specs))
        self._hopper_decode: Any = None
        self._hopper_prefill: Any = None
        self._widens = setup.specs[0].dtype == torch.float8_e4m3fn
        num_kv_heads, key_size = self._specs[0].num_kv_heads, self._specs[0].key_size
        # Hopper's kernels and cascade attention take one size of heads, the same in all layers. They decide a step's
        # variant, and so its graph, which all ranks capture together: they must agree.
        sizes = {(spec.num_kv_heads, spec.key_size, spec.value_size) for spec in self._specs}
        is_same = sizes == {(num_kv_heads, key_size, key_size)}
        are_alike = all_reduce_min(int(is_same)) == 1
        if are_alike and is_hopper(device):
            from nanovllm.kernels.attention import hopper_decode, hopper_prefill  # noqa: PLC0415

            if hopper_prefill.supports(dtype, key_size, BLOCK_SIZE if self._widens else setup.block_size):
                self._hopper_prefill = hopper_prefill.hopper_prefill_attention
            is_supported = hopper_decode.supports(dtype, self.num_heads, num_kv_heads, key_size, setup.block_size)
            self._hopper_decode = hopper_decode if is_supported and policy.uses_hopper_decode else None
        # Layers with windows take no part in cascade attention.
        shares = setup.shares_prefixes and are_alike and policy.uses_cascade and cascade_attention.supports(key_size)
        shares = shares and any(spec.window is None for spec in self._specs)
        max_items = all_reduce_min(_CASCADE_PROGRAMS * self.num_processors // num_kv_heads) if shares else 0
        self._fewest_kv_heads = all_reduce_min(num_kv_heads)
        rows_per_item = cascade_attention.rows_per_item(self.num_heads // num_kv_heads)
        self.cascade = CascadePlanner(setup.num_slots, setup.block_size, max_items, rows_per_item, device)
        self.plan_buffer = self.cascade.buffer

    @override
    def variants(self) -> list[CaptureVariant]:
        splits = (False,) if self._hopper_decode is None else (True, False)
        # Cascade attention pays with many rows only, and by more than the padding costs.
        ways = (False, True) if self.cascade.max_items else (False,)
        return [CaptureVariant(DecodeVariant(way, single), is_coarse=way) for way in ways for single in splits]

    @override
    def plan_host(self, slots: np.ndarray, num_computed: np.ndarray, block_tables: np.ndarray) -> HostPlan:
        shared_lens = self.cascade.plan(slots, num_computed, block_tables)
        single_split = False
        if self._hopper_decode is not None:
            seq_lens = num_computed[slots] + 1
            own_lens = seq_lens if shared_lens is None else seq_lens - shared_lens
            single_split = self.policy.single_split(self._fewest_kv_heads, own_lens)
        return HostPlan(DecodeVariant(shared_lens is not None, single_split), self.cascade.packed)

    @override
    def check(self, spec: Paged, options: AttentionOptions) -> None:
        if max(spec.key_size, spec.value_size) > MAX_HEAD_SIZE:
            raise ValueError(
                f"keys of {spec.key_size} elements and values of {spec.value_size} are supported by "
                f"attention_backend='sdpa' alone: this one takes at most {MAX_HEAD_SIZE}"
            )

    @override
    def plan(self, step: StepMetadata) -> None:
        """Divide the decode rows' contexts, or what windows leave of them, among programs, by what layers cache."""
        step.plan = StepPlan(self._plan_decodes(step), self._plan_wide(step))

    def _plan_wide(self, step: StepMetadata) -> WideTables | None:
        lens, num_tokens = step.seq_lens_host[step.num_decodes :], sum(step.query_lens_host)
        if self._hopper_prefill is None or not self._widens or not lens:
            return None
        if not self.policy.widens_contexts(sum(lens), num_tokens):
            return None
        return plan_wide_tables(step.seq_lens[step.num_decodes :], lens)

    def _plan_decodes(self, step: StepMetadata) -> dict[Paged, DecodePlan]:
        n = step.num_decodes
        if not n:
            return {}
        uses_cascade, single_split = cast(DecodeVariant, step.variant)
        groups = self.cascade.groups if uses_cascade else None
        is_hopper = self._hopper_decode is not None and step.num_queries == 1
        plans = {}
        for spec in self._specs:
            tile, programs = self._division(spec, step, is_hopper)
            at_once = max(1, programs * self.num_processors // spec.num_kv_heads)
            shares = 1 if is_hopper and single_split else self.policy.context_shares(n, at_once)
            plans[spec] = plan_decode(
                step.seq_lens[:n], self.num_heads, spec.num_kv_heads, spec.value_size, tile, shares,
                shared=groups if spec.window is None else None, window=spec.window, positions=step.row_positions,
            )  # fmt: skip
        return plans

    def _division(self, spec: Paged, step: StepMetadata, is_hopper: bool) -> tuple[int, int]:
        if is_hopper:
            return self._hopper_decode.TILE.value, _HOPPER_PROGRAMS
        tile, programs = _MANY_TILE, _MANY_PROGRAMS
        if self.policy.has_few_seqs(step.num_decodes):
            tile, programs = _FEW_TILE, _FEW_PROGRAMS
        if step.num_queries > 1:
            # Products of more rows take the registers and the shared memory of more keys.
            tile = _FEW_TILE
        if self.dtype == torch.float32:
            tile = _FLOAT32_TILE
        # Larger heads take the shared memory of more tokens.
        largest = max(128, padded_size(max(spec.key_size, spec.value_size)))
        return max(_LEAST_TILE, tile * 128 // largest), programs

    @override
    def run(self, query: torch.Tensor, layer: AttentionLayer, step: StepMetadata) -> torch.Tensor:
        pages, scale, options = layer.pages, layer.scale, layer.options
        out = query.new_empty(len(query), self.num_heads, pages.v_cache.shape[3])
        n, rows, tables = step.num_row_tokens, step.num_decodes, step.block_tables[layer.group]
        is_plain, plan = options.is_plain, cast(StepPlan, step.plan)
        if n and is_plain and self._hopper_decode is not None and n == rows:
            self._hopper_decode.hopper_decode_attention(
                query[:n], pages, out[:n], tables[:n], step.slot_mappings[layer.group][:n],
                plan.decodes[layer.spec], scale,
            )  # fmt: skip
        elif n:
            decode_attention(query[:n], pages, out[:n], tables[:rows], plan.decodes[layer.spec], scale, options)
        if len(step.query_tiles):
            chunks = ChunkRows(tables[rows:], step.seq_lens[rows:], step.cu_seqlens_q, step.query_tiles)
            if is_plain and plan.wide is not None:
                pages = widen_pages(pages, chunks.block_tables, chunks.seq_lens, plan.wide, query.dtype)
                chunks = replace(chunks, block_tables=plan.wide.block_tables)
            if is_plain and self._hopper_prefill is not None and pages.scales is None:
                self._hopper_prefill(query[n:], pages, out[n:], chunks, scale, self.num_processors)
            else:
                prefill_attention(query[n:], pages, out[n:], chunks, scale, options)
        return out

    @override
    def run_projected(
        self, qkv: torch.Tensor, rope: NormRope, layer: AttentionLayer, step: StepMetadata
    ) -> torch.Tensor | None:
        """Supported by `hopper_decode`, for decode rows of one token only, without cascade attention."""
        uses_cascade, _ = cast(DecodeVariant, step.variant)
        if self._hopper_decode is None or uses_cascade or len(step.query_tiles) or step.num_queries > 1:
            return None
        out = qkv.new_empty(len(qkv), self.num_heads, qkv.shape[2])
        plan = step.plan.decodes[layer.spec]
        tables, slot_mapping = step.block_tables[layer.group], step.slot_mappings[layer.group]
        self._hopper_decode.hopper_decode_attention(
            qkv, layer.pages, out, tables, slot_mapping, plan, layer.scale, rope=rope
        )
        return out
