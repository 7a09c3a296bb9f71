"""Temperature sampling in one pass over the logits, by the Gumbel maximum.

`argmax(logits + temperature * g)` with independent Gumbel noise g is a draw from `softmax(logits / temperature)`
(Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). Written with the temperature on the noise, temperature 0 is argmax
with no special case, and no division overflows.

The noise comes from Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the
request's seed, counted by (token id / 4, index of the output token); a token takes word `token id % 4`. So it depends
on nothing but the request: not on the batch, the slot, the step, or the device.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, pdl_options, tl, triton

_MASK32 = 0xFFFFFFFF
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


def gumbel_noise(vocab_size: int, seeds: torch.Tensor, output_index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, [num_rows, vocab_size] float32, of requests' seeds [num_rows, 2] and token indices."""
    device = seeds.device
    counter0 = torch.arange(-(-vocab_size // 4), device=device)
    key = (seeds.long() & _MASK32).unsqueeze(1)
    words = philox(counter0, output_index.long().unsqueeze(1), key)
    return _gumbel(words.flatten(1)[:, :vocab_size])


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    # u in (0, 1), fine near 0, where the exponential -log(1 - u) of the winner lies; 1 - u alone would round that away.
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exponential = torch.where(u < 2.0**-10, u + u * u * (0.5 + u / 3), -torch.log(1 - u))
    return -torch.log(exponential)


def sample_ref(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
) -> torch.Tensor:
    """Plain torch form of `sample`."""
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    # A row at a time, whose intermediate results stay in the cache: half the time of 64 at once.
    for row in (temperatures > 0).nonzero():
        scores[row] += temperatures[row] * gumbel_noise(logits.shape[1], seeds[row], output_index[row])
    return scores.argmax(dim=1)


@triton.jit(do_not_specialize=["temperature_stride", "seed_stride"])
def _partial_argmax_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    output_index_ptr,
    partial_score_ptr,
    partial_token_ptr,
    vocab_size,
    logits_stride,
    temperature_stride,
    seed_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    tokens = start + tl.arange(0, BLOCK)
    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    scores = tl.load(logits_row_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
    # NaN has no place in an order; what comes out must be a token in any case.
    scores = tl.where(scores == scores, scores, -float("inf"))  # noqa: PLR0124
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    if temperature > 0:
        seed_lo = tl.load(seeds_ptr + row * seed_stride).to(tl.uint32, bitcast=True)
        seed_hi = tl.load(seeds_ptr + row * seed_stride + 1).to(tl.uint32, bitcast=True)
        counter0 = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        counter1 = tl.zeros_like(counter0) + tl.load(output_index_ptr + row).to(tl.uint32)
        zero = tl.zeros_like(counter0)
        seed = (seed_hi.to(tl.uint64) << 32) | seed_lo.to(tl.uint64)
        r0, r1, r2, r3 = tl.philox(seed, counter0, counter1, zero, zero)
        words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCK])
        u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
        exponential = tl.where(u < 0.0009765625, u + u * u * (0.5 + u / 3), -tl.log(1 - u))
        scores += temperature * -tl.log(exponential)
        scores = tl.where(tokens < vocab_size, scores, -float("inf"))
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    partial = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_score_ptr + partial, best)
    tl.store(partial_token_ptr + partial, start + index)


@triton.jit
def _final_argmax_kernel(scores_ptr, tokens_ptr, sampled_ptr, num_pieces, PIECES: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
    scores = tl.load(scores_ptr + row * num_pieces + pieces, mask=pieces < num_pieces, other=-float("inf"))
    # Pieces are in the order of their tokens, so the first of equals has the lowest id.
    best = tl.argmax(scores, axis=0, tie_break_left=True)
    tl.store(sampled_ptr + row, tl.load(tokens_ptr + row * num_pieces + best))


def sample_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
) -> torch.Tensor:
    """Triton form of `sample`: the best of each piece of the vocabulary in one kernel, the best of those in another."""
    num_rows, vocab_size = logits.shape
    block = min(4096, max(16, triton.next_power_of_2(vocab_size)))
    num_pieces = triton.cdiv(vocab_size, block)
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
        vocab_size,
        logits.stride(0),
        temperatures.stride(0),
        seeds.stride(0),
        BLOCK=block,
        **pdl_options(logits.device),
    )
    sampled = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    padded = triton.next_power_of_2(num_pieces)
    _final_argmax_kernel[(num_rows,)](
        scores, tokens, sampled, num_pieces, PIECES=padded, num_warps=1, **pdl_options(logits.device)
    )
    return sampled


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
) -> torch.Tensor:
    """Draw one token a row; ties take the lowest id.

    Args:
        logits: [num_rows, vocab_size], any float dtype; scores are float32, and NaN is the least.
        temperatures: [num_rows] float32; 0 is argmax.
        seeds: [num_rows, 2] int32, low and high word of each request's seed.
        output_index: [num_rows] int32, how many tokens the request has generated before this one.

    Returns:
        [num_rows] int64 token ids.
    """
    return (sample_triton if logits.is_cuda else sample_ref)(logits, temperatures, seeds, output_index)
