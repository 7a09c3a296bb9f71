"""Split-KV: divide contexts of decoding sequences into splits, one per program and KV head, and merge their outputs.

The number of splits of each context is computed on the device from the context lengths, such that no split is longer
than an even share of all tiles. A CUDA graph therefore stays valid as contexts grow. Contexts are ordered by the mean
length of their splits, longest first, so that the last programs to run are short. Outputs are merged by their
log-sum-exp (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.attention.head_outputs import HeadOutputs, element_type, pointer, scaling, store_outputs
from nanovllm.kernels.attention.online_softmax import load_heads, merge_states

_BLOCK = 16
"""Sequences per program of the splitting kernel."""
_CHUNK = 512
"""Sequences that these are compared with at once: of 2,048 not all would fit into registers."""
_MERGED_AT_ONCE = 16


@dataclass
class ContextSplits:
    """The splits of a step's contexts, shared by all layers.

    Attributes:
        splits: [num_splits, 4] int32; sequence (-1: unused), first tile, number of tiles, and the number of tokens in
            all the context's tiles, which is its length without its prefix and its new token.
        of_seqs: [num_seqs, 2] int32; each sequence's first split and number of splits, which are consecutive.
    """

    splits: torch.Tensor
    of_seqs: torch.Tensor


def split_contexts_ref(
    seq_lens: torch.Tensor, tile: int, shares: int, prefix_lens: torch.Tensor | None = None
) -> ContextSplits:
    """Plain torch form of `split_contexts`."""
    old = seq_lens.long() - 1
    if prefix_lens is not None:
        old -= prefix_lens[: len(old)]
    tiles = -(-old // tile)
    weights = tiles.clamp(min=1)
    counts = -(-weights // -(-weights.sum() // shares))
    order = torch.sort(old // counts, descending=True, stable=True).indices
    firsts = torch.empty_like(order)
    firsts[order] = counts[order].cumsum(0) - counts[order]
    seqs = order.repeat_interleave(counts[order])
    number = torch.arange(len(seqs), device=old.device) - firsts[seqs]
    starts, ends = (n * tiles[seqs] // counts[seqs] for n in (number, number + 1))
    splits = torch.full((len(old) + shares - 1, 4), -1, dtype=torch.int32, device=old.device)
    splits[: len(seqs)] = torch.stack([seqs, starts, ends - starts, old[seqs]], 1).int()
    return ContextSplits(splits, torch.stack([firsts, counts], 1).int())


@jit
def _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs, HAS_PREFIX: tl.constexpr):
    """Return the tokens of contexts that are in tiles."""
    mask = seqs < num_seqs
    old = tl.load(seq_lens_ptr + seqs, mask=mask, other=1) - 1
    if HAS_PREFIX:
        old -= tl.load(prefix_lens_ptr + seqs, mask=mask, other=0)
    return old


@jit(do_not_specialize=["num_seqs", "shares", "num_splits"], unaligned=["seq_lens_ptr", "prefix_lens_ptr"])
def _split_contexts_kernel(
    seq_lens_ptr, prefix_lens_ptr, splits_ptr, of_seqs_ptr, num_seqs, shares, num_splits,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HAS_PREFIX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offsets, own = tl.arange(0, CHUNK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_own = own < num_seqs
    wait_for_previous(PDL)
    own_old = _load_old(seq_lens_ptr, prefix_lens_ptr, own, num_seqs, HAS_PREFIX)
    own_tiles = tl.cdiv(own_old, TILE)
    num_tiles = 0
    for chunk in range(0, num_seqs, CHUNK):
        seqs = chunk + offsets
        old = _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs, HAS_PREFIX)
        num_tiles += tl.sum(tl.where(seqs < num_seqs, tl.maximum(tl.cdiv(old, TILE), 1), 0), axis=0)
    longest = tl.cdiv(num_tiles, shares)
    own_counts = tl.where(is_own, tl.cdiv(tl.maximum(own_tiles, 1), longest), 0)
    own_sizes = (own_old // tl.maximum(own_counts, 1))[:, None]
    # A context's first split is the number of splits that are ordered before it.
    first = tl.zeros([BLOCK], dtype=tl.int32)
    num_used = 0
    for chunk in range(0, num_seqs, CHUNK):
        seqs = chunk + offsets
        old = _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs, HAS_PREFIX)
        counts = tl.cdiv(tl.maximum(tl.cdiv(old, TILE), 1), longest)
        sizes = (old // counts)[None, :]
        counts = tl.where(seqs < num_seqs, counts, 0)
        is_before = (sizes > own_sizes) | ((sizes == own_sizes) & (seqs[None, :] < own[:, None]))
        first += tl.sum(tl.where(is_before, counts[None, :], 0), axis=1)
        num_used += tl.sum(counts, axis=0)
    tl.store(of_seqs_ptr + 2 * own, first, mask=is_own)
    tl.store(of_seqs_ptr + 2 * own + 1, own_counts, mask=is_own)
    for number in range(tl.max(own_counts, axis=0)):
        mask = number < own_counts
        start = number * own_tiles // tl.maximum(own_counts, 1)
        end = (number + 1) * own_tiles // tl.maximum(own_counts, 1)
        split_ptrs = splits_ptr + 4 * (first + number)
        tl.store(split_ptrs, own, mask=mask)
        tl.store(split_ptrs + 1, start, mask=mask)
        tl.store(split_ptrs + 2, end - start, mask=mask)
        tl.store(split_ptrs + 3, own_old, mask=mask)
    for split in range(num_used + tl.program_id(0), num_splits, tl.num_programs(0)):
        tl.store(splits_ptr + 4 * split + tl.arange(0, 4), -1)


def split_contexts(
    seq_lens: torch.Tensor, tile: int, shares: int, prefix_lens: torch.Tensor | None = None
) -> ContextSplits:
    """Split contexts, ordered by the mean length of their splits, longest first; ties keep their order.

    Args:
        seq_lens: [num_seqs] int32, at least 1 each; a context's last token, the new one, is in no tile.
        tile: tokens per tile.
        shares: a split has at most ceil(tiles of all contexts / shares) tiles; 1 gives each context a single split. The
            result has num_seqs + shares - 1 rows, unused ones included.
        prefix_lens: [num_seqs or more] int32; leading tokens of each context to leave out, fewer than it has.
    """
    if not uses_triton(seq_lens.device):
        return split_contexts_ref(seq_lens, tile, shares, prefix_lens)
    num_seqs = len(seq_lens)
    splits, of_seqs = seq_lens.new_empty(num_seqs + shares - 1, 4), seq_lens.new_empty(num_seqs, 2)
    _split_contexts_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        seq_lens, prefix_lens, splits, of_seqs, num_seqs, shares, len(splits),
        TILE=tile, CHUNK=_CHUNK, BLOCK=_BLOCK, HAS_PREFIX=prefix_lens is not None, **pdl_options(seq_lens.device),
    )  # fmt: skip
    return ContextSplits(splits, of_seqs)


@jit(do_not_specialize=["out_scale_row_stride", "out_scale_head_stride"], unaligned=["of_seqs_ptr", "out_scale_ptr"])
def _merge_splits_kernel(
    out_ptr, partial_ptr, lse_ptr, of_seqs_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr,
    out_scale_ptr=None, out_scale_row_stride=0, out_scale_head_stride=0, OUT_NATIVE: tl.constexpr = False,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(of_seqs_ptr + 2 * seq)
    count = tl.load(of_seqs_ptr + 2 * seq + 1)
    wait_for_previous(PDL)
    if count > 1:
        dims = tl.arange(0, PADDED)
        acc = tl.zeros([PADDED], dtype=tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(0, count, AT_ONCE):
            number = start + tl.arange(0, AT_ONCE)
            mask = number < count
            rows = (first + number) * HEADS + head
            lse = tl.load(lse_ptr + rows, mask=mask, other=-float("inf"))
            partial_ptrs = partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
            partial = load_heads(partial_ptrs, mask[:, None], dims[None, :], HEAD_DIM, PADDED)
            acc, top, total = merge_states(lse, partial, acc, top, total)
        scale_place = seq * out_scale_row_stride + head * out_scale_head_stride + tl.arange(0, 1)
        store_outputs(
            (acc / total)[None, :], out_ptr, (seq * HEADS + head) * HEAD_DIM + dims[None, :],
            None if PADDED == HEAD_DIM else dims[None, :] < HEAD_DIM,
            out_scale_ptr, scale_place, None, DTYPE, OUT_NATIVE,
        )  # fmt: skip


def merge_splits(
    out: HeadOutputs, partial: tuple[torch.Tensor, torch.Tensor], of_seqs: torch.Tensor, dtype: torch.dtype
) -> None:
    """Merge the outputs of contexts with several splits into `out`; rows of other contexts are left unchanged.

    Args:
        out: of num_seqs rows.
        partial: outputs of the splits, [num_splits, num_heads, head_dim] float32, and their base-2 log-sum-exp,
            [num_splits, num_heads] float32.
        of_seqs: see `ContextSplits`; written before the kernel queued last (see `pdl_options`).
        dtype: to which outputs are rounded.
    """
    outputs, lse = partial
    _, num_heads, head_dim = outputs.shape
    _merge_splits_kernel[(len(of_seqs), num_heads)](
        pointer(out), outputs, lse, of_seqs,
        HEADS=num_heads, HEAD_DIM=head_dim, PADDED=triton.next_power_of_2(head_dim), AT_ONCE=_MERGED_AT_ONCE,
        DTYPE=element_type(dtype), num_warps=1, **pdl_options(of_seqs.device), **scaling(out),
    )  # fmt: skip
