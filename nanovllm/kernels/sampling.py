"""Temperature sampling in one pass over the logits by the Gumbel-max trick: draw a group of tokens, then a token of it.

The argmax of `logits + temperature * g` with independent Gumbel noise g is a draw from `softmax(logits / temperature)`
(Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030); temperature 0 is argmax without a special case. The maximum over a
group is distributed as one such sum with the logit `temperature * log(sum(exp(logits / temperature)))`, and independent
of the token that attains it. So a group is drawn first and a token of it second, which needs a 64th of the noise.

The noise is Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the request's
seed. A group's counter is (group, index of the output token, 1), a token's is (token id / 4, index of the output token,
0), and it takes word `token id % 4`. The noise therefore depends only on the request, not on the batch, slot, step
or device. Ranks that share the vocabulary each take the best of their groups; the best of these is the draw.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous

_MASK32 = 0xFFFFFFFF
GROUP = 64
"""Tokens per group; vocabulary shards start at a multiple of it."""
_GROUP = tl.constexpr(GROUP)
_MAX_ELEMENTS = 2**17
"""Logits that the plain form processes at once, so that its intermediate results stay in the CPU's cache."""
_LEAST_TEMPERATURE = 1e-30
"""Lower bound of the temperature before its inverse is taken; colder draws are the argmax in any case."""
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter0: torch.Tensor, counter1: torch.Tensor, key: torch.Tensor, counter2: int = 0) -> torch.Tensor:
    """Return Philox-4x32-10 of the counters (counter0, counter1, counter2, 0): [..., 4] int64, random 32-bit words.

    The counters are int64 in 0 ... 2**32 - 1 and broadcast with key[..., 0]; key: [..., 2] int64, low and high word.
    """
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, k0, k1 = torch.broadcast_tensors(counter0, counter1, k0, k1)
    c2, c3 = torch.full_like(c0, counter2), torch.zeros_like(c0)
    for _ in range(10):
        # int64 wraps to the right 64 bits of a product of 32-bit words.
        wide0, wide1 = c0 * _PHILOX_M0, c2 * _PHILOX_M1
        c0, c2 = (wide1 >> 32) & _MASK32 ^ c1 ^ k0, (wide0 >> 32) & _MASK32 ^ c3 ^ k1
        c1, c3 = wide1 & _MASK32, wide0 & _MASK32
        k0, k1 = (k0 + _PHILOX_W0) & _MASK32, (k1 + _PHILOX_W1) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def group_noise(num_groups: int, seeds: torch.Tensor, output_index: torch.Tensor, first_group: int = 0) -> torch.Tensor:
    """Return standard Gumbel noise of the groups from `first_group` on, [num_rows, num_groups] float32."""
    groups = first_group + torch.arange(num_groups, device=seeds.device)
    return _gumbel(_words(groups, seeds, output_index, 1)[..., 0])


def token_noise(groups: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise of the tokens of one group per row, [num_rows], as [num_rows, GROUP] float32."""
    counters = groups.unsqueeze(1) * (GROUP // 4) + torch.arange(GROUP // 4, device=seeds.device)
    return _gumbel(_words(counters, seeds, output_index, 0).flatten(1))


def _words(counter0: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor, counter2: int) -> torch.Tensor:
    key = (seeds.long() & _MASK32).unsqueeze(1)
    return philox(counter0, output_index.long().unsqueeze(1), key, counter2)


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    # The winner has u near 0, where the exponential -log(1 - u) needs a series: 1 - u would round u away.
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exponential = torch.where(u < 2.0**-10, u + u * u * (0.5 + u / 3), -torch.log(1 - u))
    return -torch.log(exponential)


def sample_ref(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor,
    first_token: int = 0, num_tokens: int | None = None, cutoffs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch form of `sample`."""
    num_rows, num_columns = logits.shape
    num_tokens = num_columns if num_tokens is None else num_tokens
    assert first_token % GROUP == 0
    num_groups, first_group = -(-num_columns // GROUP), first_token // GROUP
    scores = torch.full((num_rows, num_groups * GROUP), float("-inf"), device=logits.device)
    scores[:, :num_tokens] = logits[:, :num_tokens]
    scores = scores.masked_fill_(scores.isnan(), float("-inf"))
    if cutoffs is not None:
        scores.masked_fill_(scores < cutoffs.unsqueeze(1), float("-inf"))
    scores = scores.view(num_rows, num_groups, GROUP)
    group_scores = scores.amax(dim=2)
    hot = (temperatures > 0).nonzero().flatten()
    # Greedy rows skip the noise, which on a CPU would be a fifth of a small model's step.
    parts = hot.split(max(1, _MAX_ELEMENTS // num_columns)) if len(hot) else ()
    for rows in parts:
        temperature, greatest = temperatures[rows].view(-1, 1, 1), group_scores[rows].unsqueeze(2)
        # An infinite maximum minus itself would be NaN.
        below = torch.where(scores[rows] == greatest, 0.0, scores[rows] - greatest)
        sums = (below / temperature.clamp(min=_LEAST_TEMPERATURE)).exp().sum(dim=2)
        noise = group_noise(num_groups, seeds[rows], output_index[rows], first_group)
        group_scores[rows] += temperature.squeeze(2) * (sums.log() + noise)
    best = group_scores.argmax(dim=1)
    all_rows = torch.arange(num_rows, device=logits.device)
    keys = scores[all_rows, best]
    for rows in parts:
        noise = token_noise(first_group + best[rows], seeds[rows], output_index[rows])
        keys[rows] += temperatures[rows].unsqueeze(1) * noise
    return group_scores[all_rows, best], first_token + best * GROUP + keys.argmax(dim=1)


@jit
def _gumbel_triton(words):
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    return -tl.log(tl.where(u < 0.0009765625, u + u * u * (0.5 + u / 3), -tl.log(1 - u)))


@jit
def _words_triton(seeds_ptr, output_index_ptr, row, seed_stride, counter0, COUNTER2: tl.constexpr):
    seed_lo = tl.load(seeds_ptr + row * seed_stride).to(tl.uint32, bitcast=True)
    seed_hi = tl.load(seeds_ptr + row * seed_stride + 1).to(tl.uint32, bitcast=True)
    counter0 = counter0.to(tl.uint32)
    zero = tl.zeros_like(counter0)
    counter1 = zero + tl.load(output_index_ptr + row).to(tl.uint32)
    seed = (seed_hi.to(tl.uint64) << 32) | seed_lo.to(tl.uint64)
    return tl.philox(seed, counter0, counter1, zero + COUNTER2, zero)


@jit(do_not_specialize=["temperature_stride"])
def _group_kernel(
    logits_ptr, temperatures_ptr, cutoffs_ptr, group_score_ptr, num_tokens, num_groups, least_temperature,
    logits_stride, temperature_stride, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    wait_for_previous(PDL)
    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    logits = tl.load(logits_row_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    # NaN becomes -inf, so that the argmax is always a valid token.
    logits = tl.where(logits == logits, logits, -float("inf"))  # noqa: PLR0124
    if cutoffs_ptr is not None:
        logits = tl.where(logits >= tl.load(cutoffs_ptr + row), logits, -float("inf"))
    scores = tl.max(logits, axis=1)
    if temperature > 0:
        # An infinite maximum minus itself would be NaN.
        below = tl.where(logits == scores[:, None], 0.0, logits - scores[:, None])
        sums = tl.sum(tl.exp(below * (1 / tl.maximum(temperature, least_temperature))), axis=1)
        scores += temperature * tl.log(sums)
    tl.store(group_score_ptr + row.to(tl.int64) * num_groups + groups, scores, mask=groups < num_groups)


@jit(do_not_specialize=["temperature_stride", "seed_stride"])
def _draw_kernel(
    logits_ptr, temperatures_ptr, cutoffs_ptr, seeds_ptr, output_index_ptr, group_score_ptr, score_ptr, sampled_ptr,
    num_tokens, num_groups, first_token, logits_stride, temperature_stride, seed_stride,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    # The noise does not depend on the previous kernel, so it is computed before `gdc_wait`.
    word, _, _, _ = _words_triton(seeds_ptr, output_index_ptr, row, seed_stride, first_token // _GROUP + groups, 1)
    noise = temperature * _gumbel_triton(word)
    wait_for_previous(PDL)
    group_row_ptr = group_score_ptr + row.to(tl.int64) * num_groups
    scores = noise + tl.load(group_row_ptr + groups, mask=groups < num_groups, other=-float("inf"))
    score, group = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    start = group * _GROUP
    columns = start + tl.arange(0, _GROUP)
    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    logits = tl.load(logits_row_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    if cutoffs_ptr is not None:
        logits = tl.where(logits >= tl.load(cutoffs_ptr + row), logits, -float("inf"))
    counter0 = (first_token + start) // 4 + tl.arange(0, _GROUP // 4)
    r0, r1, r2, r3 = _words_triton(seeds_ptr, output_index_ptr, row, seed_stride, counter0, 0)
    token_noise = _gumbel_triton(tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [_GROUP]))
    keys = tl.where(logits == logits, logits + temperature * token_noise, -float("inf"))  # noqa: PLR0124
    _, index = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(score_ptr + row, score)
    tl.store(sampled_ptr + row, (first_token + start + index).to(tl.int64))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor,
    first_token: int = 0, num_tokens: int | None = None, cutoffs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw one token per row; ties take the lowest id.

    All inputs but logits and cutoffs must be written before the kernel queued last (see `pdl_options`).

    Args:
        logits: [num_rows, num_columns], any float dtype; NaN counts as -inf.
        temperatures, seeds, output_index: see `SamplingInputs`.
        first_token: token id of the first column, a multiple of GROUP.
        num_tokens: columns that are tokens; the rest is padding and never drawn. None for all.
        cutoffs: [num_rows] float32; logits below count as -inf.

    Returns:
        The scores of the drawn tokens' groups, [num_rows] float32, which ranks with shards of the vocabulary compare,
        and the token ids, [num_rows] int64.
    """
    if not uses_triton(logits.device):
        return sample_ref(logits, temperatures, seeds, output_index, first_token, num_tokens, cutoffs)
    num_rows, num_columns = logits.shape
    num_tokens = num_columns if num_tokens is None else num_tokens
    num_groups, device = triton.cdiv(num_columns, GROUP), logits.device
    group_scores = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    scores = torch.empty(num_rows, dtype=torch.float32, device=device)
    sampled = torch.empty(num_rows, dtype=torch.int64, device=device)
    assert logits.stride(1) == 1 and seeds.stride(1) == 1 and first_token % GROUP == 0
    padded = triton.next_power_of_2(num_groups)
    groups = min(32, padded)
    _group_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        logits, temperatures, cutoffs, group_scores, num_tokens, num_groups, _LEAST_TEMPERATURE,
        logits.stride(0), temperatures.stride(0), GROUPS=groups, **pdl_options(device),
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, temperatures, cutoffs, seeds, output_index, group_scores, scores, sampled,
        num_tokens, num_groups, first_token, logits.stride(0), temperatures.stride(0), seeds.stride(0),
        GROUPS=padded, num_warps=8, **pdl_options(device),
    )  # fmt: skip
    return scores, sampled
