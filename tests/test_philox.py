"""The noise's generator against the answers published with it."""

from __future__ import annotations

import pytest
import torch

from nanovllm.kernels import sampling

ONES = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 in Python's integers, which takes a fourth word of the counter; ours has 0 there."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & ONES, low >> 32 ^ c3 ^ k1, low & ONES
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return [c0, c1, c2, c3]


def words(*counter_and_key: int) -> list[int]:
    c0, c1, c2, *key = counter_and_key
    words: list[int] = sampling.philox(torch.tensor(c0), torch.tensor(c1), torch.tensor(key), c2).tolist()
    return words


def test_published_answers() -> None:
    """The three vectors of Random123's `kat_vectors`; all of ours that has a 0 in the right place is the first."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8] == words(0, 0, 0, 0, 0)
    assert philox([ONES] * 4, [ONES] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(PI[:4], PI[4:]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("key", [[ONES, ONES], PI[4:], [0, ONES], [5, 0]])
@pytest.mark.parametrize("counter", [[0, 0, 0], [ONES] * 3, PI[:3]])
def test_every_key_and_counter(counter: list[int], key: list[int]) -> None:
    assert words(*counter, *key) == philox([*counter, 0], key)


def test_noise_is_keyed_by_the_seeds_bits_and_counted_by_group_and_token() -> None:
    """Seeds are words with a sign; group 3 has the tokens 192 ... 255, whose counters are 48 ... 63."""
    seeds = torch.tensor([[-1, -1], [-(2**31), 7]], dtype=torch.int32)
    keys = [[ONES, ONES], [2**31, 7]]
    index = torch.tensor([9, 2**31 - 1], dtype=torch.int32)
    groups = sampling.group_noise(4, seeds, index)
    tokens = sampling.token_noise(torch.tensor([3, 3]), seeds, index)
    for row, (key, count) in enumerate(zip(keys, index.tolist(), strict=True)):
        of_groups = [philox([group, count, 1, 0], key)[0] for group in range(4)]
        of_tokens = [word for counter in range(48, 64) for word in philox([counter, count, 0, 0], key)]
        for noise, drawn in ((groups[row], of_groups), (tokens[row], of_tokens)):
            uniform = (torch.tensor(drawn, dtype=torch.float64) + 0.5) / 2**32
            torch.testing.assert_close(noise.double(), -(-(-uniform).log1p()).log(), rtol=1e-5, atol=1e-5)
