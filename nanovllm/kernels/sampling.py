"""Temperature sampling in one pass over the logits, by the Gumbel maximum.

`argmax(logits + temperature * g)` with independent Gumbel noise g is a draw from `softmax(logits / temperature)`
(Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). Written with the temperature on the noise, temperature 0 is argmax
with no special case, and no division overflows.

The noise comes from Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the
request's seed, counted by (token id / 4, index of the output token); a token takes word `token id % 4`. So it depends
on nothing but the request: not on the batch, the slot, the step, or the device. Nor on how many devices share the
vocabulary: each takes the best of its own tokens, and the best of those is the best of all.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.model_shard import Share

_MASK32 = 0xFFFFFFFF
_NOISE_PIECE = 2**17
"""Elements of noise that the plain form draws at once: with 152k tokens, a sixth of the time of 8 rows at once."""
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85


def _mul_hi_lo(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 by 32 bit product, all held in int64, whose product wraps to the right 64 bits."""
    product = a * m
    return (product >> 32) & _MASK32, product & _MASK32


def philox(counter0: torch.Tensor, counter1: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10 of counters (counter0, counter1, 0, 0).

    Args:
        counter0, counter1: int64 in 0 ... 2**32 - 1, of shapes that broadcast with key's.
        key: [..., 2] int64, low and high word.

    Returns:
        [..., 4] int64, four random words of 32 bits.
    """
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, k0, k1 = torch.broadcast_tensors(counter0, counter1, k0, k1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, _PHILOX_M0)
        hi1, lo1 = _mul_hi_lo(c2, _PHILOX_M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _PHILOX_W0) & _MASK32, (k1 + _PHILOX_W1) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(
    num_tokens: int, seeds: torch.Tensor, output_index: torch.Tensor, first_token: int = 0
) -> torch.Tensor:
    """Standard Gumbel noise of requests' seeds [num_rows, 2] and output indices [num_rows].

    Returns:
        [num_rows, num_tokens] float32, for the tokens from `first_token`, a multiple of 4, on.
    """
    counter0 = first_token // 4 + torch.arange(-(-num_tokens // 4), device=seeds.device)
    key = (seeds.long() & _MASK32).unsqueeze(1)
    words = philox(counter0, output_index.long().unsqueeze(1), key)
    return _gumbel(words.flatten(1)[:, :num_tokens])


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    # u in (0, 1), fine near 0, where the exponential -log(1 - u) of the winner lies; 1 - u alone would round that away.
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exponential = torch.where(u < 2.0**-10, u + u * u * (0.5 + u / 3), -torch.log(1 - u))
    return -torch.log(exponential)


def sample_ref(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    output_index: torch.Tensor,
    vocab: Share | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `sample`."""
    vocab = vocab or Share.whole(logits.shape[1])
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    # A few rows at a time, whose intermediate results stay in the cache.
    hot = (temperatures > 0).nonzero().squeeze(1)
    for rows in hot.split(max(1, _NOISE_PIECE // logits.shape[1])):
        noise = gumbel_noise(logits.shape[1], seeds[rows], output_index[rows], vocab.start)
        scores[rows] += temperatures[rows].unsqueeze(1) * noise
    scores[:, vocab.num_present :] = float("-inf")
    best = scores.argmax(dim=1, keepdim=True)
    return scores.gather(1, best).squeeze(1), vocab.start + best.squeeze(1)


@jit(do_not_specialize=["temperature_stride", "seed_stride"])
def _partial_argmax_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    output_index_ptr,
    partial_score_ptr,
    partial_token_ptr,
    num_tokens,
    first_token,
    logits_stride,
    temperature_stride,
    seed_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    # The noise, which takes longer than the rest, needs nothing from the kernel ahead.
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    noise = tl.zeros([BLOCK], dtype=tl.float32)
    if temperature > 0:
        seed_lo = tl.load(seeds_ptr + row * seed_stride).to(tl.uint32, bitcast=True)
        seed_hi = tl.load(seeds_ptr + row * seed_stride + 1).to(tl.uint32, bitcast=True)
        counter0 = ((first_token + start) // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        counter1 = tl.zeros_like(counter0) + tl.load(output_index_ptr + row).to(tl.uint32)
        zero = tl.zeros_like(counter0)
        seed = (seed_hi.to(tl.uint64) << 32) | seed_lo.to(tl.uint64)
        r0, r1, r2, r3 = tl.philox(seed, counter0, counter1, zero, zero)
        words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCK])
        u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
        exponential = tl.where(u < 0.0009765625, u + u * u * (0.5 + u / 3), -tl.log(1 - u))
        noise = temperature * -tl.log(exponential)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    scores = tl.load(logits_row_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    # NaN has no place in an order; what comes out must be a token in any case.
    scores = tl.where(scores == scores, scores + noise, -float("inf"))  # noqa: PLR0124
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    partial = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_score_ptr + partial, best)
    tl.store(partial_token_ptr + partial, first_token + start + index)


@jit
def _final_argmax_kernel(
    scores_ptr, tokens_ptr, best_score_ptr, sampled_ptr, num_pieces, PIECES: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
    scores = tl.load(scores_ptr + row * num_pieces + pieces, mask=pieces < num_pieces, other=-float("inf"))
    # Pieces are in the order of their tokens, so the first of equals has the lowest id.
    best_score, best = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score_ptr + row, best_score)
    tl.store(sampled_ptr + row, tl.load(tokens_ptr + row * num_pieces + best))


def sample_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    output_index: torch.Tensor,
    vocab: Share | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton form of `sample`: the best of each piece of the vocabulary in one kernel, the best of those in another."""
    num_rows, num_columns = logits.shape
    vocab = vocab or Share.whole(num_columns)
    block = min(4096, max(16, triton.next_power_of_2(num_columns)))
    num_pieces = triton.cdiv(num_columns, block)
    scores = torch.empty(num_rows, num_pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_pieces, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1 and seeds.stride(1) == 1
    _partial_argmax_kernel[(num_rows, num_pieces)](
        logits,
        temperatures,
        seeds,
        output_index,
        scores,
        tokens,
        vocab.num_present,
        vocab.start,
        logits.stride(0),
        temperatures.stride(0),
        seeds.stride(0),
        BLOCK=block,
        **pdl_options(logits.device),
    )
    best_scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sampled = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    padded = triton.next_power_of_2(num_pieces)
    _final_argmax_kernel[(num_rows,)](
        scores, tokens, best_scores, sampled, num_pieces, PIECES=padded, num_warps=1, **pdl_options(logits.device)
    )
    return best_scores, sampled


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    output_index: torch.Tensor,
    vocab: Share | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row; ties take the lowest id.

    Args:
        logits: [num_rows, num_tokens], any float dtype; scores are float32, and NaN is the least.
        temperatures: [num_rows] float32; 0 is argmax.
        seeds: [num_rows, 2] int32, low and high word of each request's seed.
        output_index: [num_rows] int32, how many tokens the request has generated before this one. All but the logits
            are older than the kernel queued last (see `pdl_options`).
        vocab: the token ids that the columns of the logits stand for, padding included, which is never drawn; its
            start is a multiple of 4. None for all of the vocabulary.

    Returns:
        The tokens' scores, [num_rows] float32, and their ids, [num_rows] int64. Scores of different shares compare.
    """
    return (sample_triton if logits.is_cuda else sample_ref)(logits, temperatures, seeds, output_index, vocab)
