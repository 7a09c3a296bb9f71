"""Every head, column and token id belongs to exactly one rank."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from nanovllm.configs.model import MODELS, LayerConfig, ModelConfig
from nanovllm.configs.rope import RopeConfig
from nanovllm.parallel.shard import ModelShard, Shard, shard_of

MODEL = ModelConfig(
    architecture=MODELS["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    layers=(LayerConfig(rope=RopeConfig(1e6)),) * 36, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
    tie_word_embeddings=False, max_position=40960, initializer_range=0.02, dtype="bfloat16",
    eos_token_ids=frozenset(),
)  # fmt: skip


def shards(size: int, **changes: Any) -> list[ModelShard]:
    model = dataclasses.replace(MODEL, **changes)
    return [shard_of(model, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("intermediate_size", [12288, 25600, 130, 1000])
@pytest.mark.parametrize("vocab_size", [151936, 320, 65, 1])
def test_shares_cover_the_model_once(size: int, intermediate_size: int, vocab_size: int) -> None:
    parts = shards(size, intermediate_size=intermediate_size, vocab_size=vocab_size)
    for name, total in (("kv_heads", 8), ("heads", 32), ("intermediate", intermediate_size), ("vocab", vocab_size)):
        shares = [getattr(part, name) for part in parts]
        covered = [i for share in shares for i in range(share.present.start, share.present.stop)]
        assert covered == list(range(total)), name
        assert all(share.stop == after.start for share, after in pairwise(shares))
    assert all(part.heads.size == 4 * part.kv_heads.size for part in parts)


@pytest.mark.parametrize("size", range(2, 9))
def test_shares_are_even_and_aligned(size: int) -> None:
    parts = shards(size, intermediate_size=1003)
    counts = [part.kv_heads.size for part in parts]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    columns = [part.intermediate.size for part in parts]
    assert all(n % 16 == 0 for n in columns[:-1]) and max(columns) - min(columns) < 32
    assert all(part.intermediate.start % 16 == 0 for part in parts)
    vocab = {part.vocab.size for part in parts}
    assert len(vocab) == 1 and vocab.pop() % 64 == 0


def test_seven_ranks_by_hand() -> None:
    parts = shards(7)
    assert [part.kv_heads.size for part in parts] == [2, 1, 1, 1, 1, 1, 1]
    assert [(part.heads.start, part.heads.stop) for part in parts[:3]] == [(0, 8), (8, 12), (12, 16)]
    assert [part.intermediate.size for part in parts] == [1760] * 5 + [1744] * 2
    assert [part.vocab.size for part in parts] == [21760] * 7
    assert parts[6].vocab.present == slice(130560, 151936)


def test_a_vocabulary_of_few_leaves_ranks_with_padding_alone() -> None:
    parts = shards(3, vocab_size=65)
    assert [part.vocab.num_present for part in parts] == [64, 1, 0]
    assert parts[2].vocab.present == slice(65, 65)


def test_one_rank_holds_all_without_padding() -> None:
    (part,) = shards(1, vocab_size=321, intermediate_size=7)
    assert (part.vocab.size, part.intermediate.size, part.kv_heads.size) == (321, 7, 8)


def test_a_share_is_whole_if_it_is_everything_and_no_more() -> None:
    assert Shard.whole(320).is_whole and Shard(0, 320, 320).is_whole
    # The first part, the last, all of it with padding, and padding alone.
    for start, stop in ((0, 192), (192, 320), (0, 384), (320, 640)):
        assert not Shard(start, stop, 320).is_whole


def test_more_ranks_than_the_model_has_parts() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=9 is over the model's 8 KV heads"):
        shards(9)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is too large for intermediate_size=40"):
        shards(3, intermediate_size=40)
