"""One rank's part of the model, of weights, of noise and of a draw, without other processes."""

from __future__ import annotations

import dataclasses
import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nanovllm.configs.model import MODELS, LayerConfig, ModelConfig
from nanovllm.configs.rope import RopeConfig
from nanovllm.kernels import sampling
from nanovllm.kernels.all_reduce import pack_candidates, unpack_tokens
from nanovllm.models import make_model
from nanovllm.models.base import CausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import ModelShard, Shard, shard_of
from nanovllm.weights import model_weights
from nanovllm.weights.model_weights import ModelWeights, rows_of
from nanovllm.weights.slices import WeightTarget
from tests.conftest import MakeCheckpoint
from tests.test_kernels import by_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 104}


class FakeRank(Communicator):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def shards(config: ModelConfig, size: int) -> list[CausalLM]:
    return [make_model(config, FakeRank(rank, size)) for rank in range(size)]


def joined(models: list[CausalLM], target: WeightTarget | None) -> torch.Tensor:
    """A tensor of the checkpoint, put together from the ranks' parts."""
    assert target is not None
    parts = [model.weight_slices()[target] for model in models]
    whole = torch.full(parts[0].shape, torch.nan)
    for part in parts:
        whole[part.index] = part.region
    return whole


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", False), ("qwen2", True), ("Olmo2", False)])
def test_the_ranks_parts_are_the_checkpoint(
    make_checkpoint: MakeCheckpoint, architecture: str, tied: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heads of 16 in Qwen2, which has no head_dim of its own.
    folder = make_checkpoint(architecture, hidden_size=96, tie_word_embeddings=tied, pad_token_id=0, **SHAPE)
    models = shards(ModelConfig.from_folder(str(folder)), size)
    read: list[int] = []
    held: list[weakref.ref[torch.Tensor]] = []

    class CountingSlice:
        def __init__(self, inner: Any) -> None:
            self.get_shape, self.inner = inner.get_shape, inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            assert not any(reference() is not None for reference in held), "the tensor before this one is still there"
            tensor: torch.Tensor = self.inner[index]
            held[:] = [weakref.ref(tensor)]
            read.append(tensor.numel())
            return tensor

    monkeypatch.setattr(
        model_weights,
        "rows_of",
        lambda tensor, parts: [(target, CountingSlice(rows)) for target, rows in rows_of(tensor, parts)],
    )
    sizes = []
    for model in models:
        read.clear()
        ModelWeights(model, torch.device("cpu")).load_folder(str(folder))
        sizes.append(sum(read))
    checked = 0
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        whole = sum(weights.get_tensor(name).numel() for name in names)
        for name in names:
            torch.testing.assert_close(joined(models, models[0].weight_targets(name)[0]), weights.get_tensor(name))
            checked += 1
    assert checked == len(names) > 20
    # The norms are everybody's; of the rest each rank has read about its shard and no more.
    assert sum(sizes) < 1.02 * whole and max(sizes) < (1 / size + 0.2) * whole


def test_kernels_are_compiled_with_one_layer_of_each_kind(make_checkpoint: MakeCheckpoint) -> None:
    (model,) = shards(ModelConfig.from_folder(os.fspath(make_checkpoint(num_hidden_layers=6))), 1)
    layers: Any = model.get_submodule("model.layers")
    with model.one_layer_of_each_kind():
        assert list(model.get_submodule("model.layers").children()) == [layers[0], layers[5]]
    layers[2].self_attn.attn.num_kv_heads += 1
    layers[3].mlp.to(torch.bfloat16)
    with pytest.raises(KeyError), model.one_layer_of_each_kind():
        assert list(model.get_submodule("model.layers").children()) == [layers[0], layers[2], layers[3], layers[5]]
        raise KeyError
    assert model.get_submodule("model.layers") is layers


def test_dummy_weights_are_one_model_however_it_is_split(checkpoint: Path) -> None:
    config = ModelConfig.from_folder(str(checkpoint))
    (whole,), halves = shards(config, 1), shards(config, 2)
    for model in (whole, *halves):
        ModelWeights(model, torch.device("cpu")).draw(5)
    for target, part in whole.weight_slices().items():
        assert torch.equal(joined(halves, target), part.region), target


SHARDS = [Shard(0, 192, 320), Shard(192, 384, 320)], [Shard(i * 64, (i + 1) * 64, 130) for i in range(4)]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("form", [sampling.sample_ref, by_triton(sampling.sample)])
def test_the_best_of_the_shards_is_the_best_of_all(shards: list[Shard], form: Any) -> None:
    rows, total = 9, shards[0].total
    temperatures = torch.rand(rows, device=DEVICE) * (torch.arange(rows, device=DEVICE) > 3)
    seeds = torch.randint(-(2**31), 2**31 - 1, (rows, 2), dtype=torch.int32, device=DEVICE)
    index = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    logits = 3 * torch.randn(rows, total, device=DEVICE)
    # A tie across shards, and a row that is nothing but ties.
    logits[0, [5, total - 1]] = 100.0
    logits[1] = 0.0
    logits[2] = torch.nan
    _, token = form(logits, temperatures, seeds, index)
    assert token[:3].tolist() == [5, 0, 0]
    keys = []
    for shard in shards:
        # What stands in the padding is never drawn.
        part = torch.full((rows, shard.size), 1e9, device=DEVICE)
        part[:, : shard.num_present] = logits[:, shard.present]
        keys.append(pack_candidates(*form(part, temperatures, seeds, index, shard.start, shard.num_present)))
        if shard.num_present:
            num_groups, first = -(-shard.num_present // sampling.GROUP), shard.start // sampling.GROUP
            noise = sampling.group_noise(num_groups, seeds, index, first)
            assert torch.equal(noise, sampling.group_noise(total, seeds, index)[:, first : first + num_groups])
    assert torch.equal(unpack_tokens(torch.stack(keys).amax(0)), token)


def test_candidates_are_in_the_order_of_scores_then_of_tokens() -> None:
    values = [-torch.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 2.5, 3e38, torch.inf]
    candidates = [(value, token) for value in values for token in (0, 7, 151935, 2**31 - 1)]
    scores, tokens = (torch.tensor(column) for column in zip(*candidates, strict=True))
    keys = pack_candidates(scores.float(), tokens.long())
    assert torch.equal(unpack_tokens(keys), tokens)
    for i, (value, token) in enumerate(candidates):
        for j, (other, other_token) in enumerate(candidates):
            better = value > other or (value == other and token < other_token)
            assert bool(keys[i] > keys[j]) == better, (candidates[i], candidates[j])


def test_a_tensor_that_does_not_fit_is_told_by_its_whole_shape(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(**SHAPE)
    config = ModelConfig.from_folder(os.fspath(make_checkpoint(**(SHAPE | {"num_attention_heads": 3}))))
    with pytest.raises(ValueError, match=r"o_proj.weight' has shape \[64, 192\]; the config asks for \[64, 96\]"):
        ModelWeights(shards(config, 3)[2], torch.device("cpu")).load_folder(str(folder))


MODEL = ModelConfig(
    architecture=MODELS["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    layers=(LayerConfig(rope=RopeConfig(1e6)),) * 36, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
    tie_word_embeddings=False, max_position=40960, initializer_range=0.02, dtype="bfloat16",
    eos_token_ids=frozenset(),
)  # fmt: skip


def shares_of(size: int, **changes: Any) -> list[ModelShard]:
    model = dataclasses.replace(MODEL, **changes)
    return [shard_of(model, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("intermediate_size", [12288, 25600, 130, 1000])
@pytest.mark.parametrize("vocab_size", [151936, 320, 65, 1])
def test_shares_cover_the_model_once(size: int, intermediate_size: int, vocab_size: int) -> None:
    parts = shares_of(size, intermediate_size=intermediate_size, vocab_size=vocab_size)
    for name, total in (("kv_heads", 8), ("heads", 32), ("intermediate", intermediate_size), ("vocab", vocab_size)):
        shares = [getattr(part, name) for part in parts]
        covered = [i for share in shares for i in range(share.present.start, share.present.stop)]
        assert covered == list(range(total)), name
        assert all(share.stop == after.start for share, after in pairwise(shares))
    assert all(part.heads.size == 4 * part.kv_heads.size for part in parts)


@pytest.mark.parametrize("size", range(2, 9))
def test_shares_are_even_and_aligned(size: int) -> None:
    parts = shares_of(size, intermediate_size=1003)
    counts = [part.kv_heads.size for part in parts]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    columns = [part.intermediate.size for part in parts]
    assert all(n % 16 == 0 for n in columns[:-1]) and max(columns) - min(columns) < 32
    assert all(part.intermediate.start % 16 == 0 for part in parts)
    vocab = {part.vocab.size for part in parts}
    assert len(vocab) == 1 and vocab.pop() % 64 == 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(16, 2, 4), (16, 2, 8), (6, 1, 4), (12, 3, 7)])
def test_ranks_share_kv_heads(num_heads: int, num_kv_heads: int, size: int) -> None:
    parts = shares_of(size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert [part.kv_heads.size for part in parts] == [1] * size
    # Each query head is somewhere, beside its KV head.
    found = [(head, part.kv_heads.start) for part in parts for head in range(part.heads.start, part.heads.stop)]
    group = num_heads // num_kv_heads
    assert found == [(head, head // group) for head in range(num_heads)]
    sizes = [part.heads.size for part in parts]
    assert min(sizes) >= 1 and (max(sizes) == min(sizes) or num_heads % size)


def test_a_share_is_whole_if_it_is_everything_and_no_more() -> None:
    assert Shard.whole(320).is_whole and Shard(0, 320, 320).is_whole
    # The first part, the last, all of it with padding, and padding alone.
    for start, stop in ((0, 192), (192, 320), (0, 384), (320, 640)):
        assert not Shard(start, stop, 320).is_whole


def test_more_ranks_than_the_model_has_parts() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=33 is over the model's 32 heads"):
        shares_of(33)
    with pytest.raises(ValueError, match="tensor_parallel_size=9 is over the model's 8 KV heads"):
        shares_of(9, architecture=MODELS["Olmo2ForCausalLM"])
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is too large for intermediate_size=40"):
        shares_of(3, intermediate_size=40)


class TwoRanks(Communicator):
    """A rank of two; the other one adds nothing."""

    size = 2
