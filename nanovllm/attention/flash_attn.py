"""Attention by the flash-attn package (Dao 2023, arXiv:2307.08691); block sizes must be multiples of 256 tokens."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from typing_extensions import override

from nanovllm.attention.backend import AttentionBackend, AttentionLayer
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import StepMetadata
from nanovllm.kernels.attention.options import AttentionOptions


class FlashAttnBackend(AttentionBackend):
    """Attention by flash-attn; only decode steps are captured in CUDA graphs."""

    @override
    def check(self, spec: Paged, options: AttentionOptions) -> None:
        if options.sinks is not None or spec.key_size != spec.value_size:
            raise ValueError("attention_backend='flash_attn' has neither sinks nor values of another size than keys")

    @override
    def plan(self, step: StepMetadata) -> None:
        return

    @override
    def run(self, query: torch.Tensor, layer: AttentionLayer, step: StepMetadata) -> torch.Tensor:
        out = query.new_empty(query.shape)
        pages, options, tables, n = layer.pages, layer.options, step.block_tables[layer.group], step.num_decodes
        how = {
            "softmax_scale": layer.scale, "causal": True, "softcap": options.softcap or 0.0,
            "window_size": (-1, -1) if options.window is None else (options.window - 1, 0),
        }  # fmt: skip
        if n:
            decoded = flash_attn_with_kvcache(
                query[:n].unsqueeze(1), pages.k_cache, pages.v_cache, cache_seqlens=step.seq_lens[:n],
                block_table=tables[:n], **how,
            )  # fmt: skip
            out[:n] = decoded.squeeze(1)
        if step.query_lens_host:
            out[n:] = flash_attn_varlen_func(
                query[n:], pages.k_cache, pages.v_cache, cu_seqlens_q=step.cu_seqlens_q,
                cu_seqlens_k=_offsets(step.seq_lens[n:]), max_seqlen_q=max(step.query_lens_host),
                max_seqlen_k=max(step.seq_lens_host[n:]), block_table=tables[n:], **how,
            )  # fmt: skip
        return out


def _offsets(lens: torch.Tensor) -> torch.Tensor:
    """Return the exclusive cumulative sum of `lens` with its total: [n] -> [n + 1] int32."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
