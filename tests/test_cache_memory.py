"""The memory that an engine takes for its cache, and the largest cache and block tables."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.attention.kv_cache_groups import single_group
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import Config
from nanovllm.configs.rope import RopeConfig
from nanovllm.layers.attention import Attention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.parallel.communicator import Communicator
from nanovllm.runner import host_blocks, memory
from nanovllm.runner.host_blocks import BlockCopies
from nanovllm.runner.kv_cache import CacheTensors, KVCache
from nanovllm.runner.messages import BlockTransfer, ScheduledBatch
from nanovllm.runner.slot_state import SlotState

CPU, META = torch.device("cpu"), torch.device("meta")


def num_blocks(
    communicator: Communicator, *, block_bytes: int, num_groups: int = 1, most_blocks: int = 2**40, **settings: Any
) -> int:
    """The blocks of a cache on the CPU."""
    config = Config("none", device="cpu", **settings)
    sizes = {
        "free_before": 0, "num_groups": num_groups, "num_state_blocks": 0, "block_bytes": block_bytes,
        "most_blocks": most_blocks,
    }  # fmt: skip
    return memory.num_cache_blocks(config, CPU, communicator, **sizes, run_step=lambda: None, extra_bytes=0)


def test_a_cache_whose_slots_are_no_int32_is_refused(checkpoint: Path) -> None:
    sizes = {"block_bytes": 1, "kvcache_block_size": 48}
    assert num_blocks(Communicator(), num_kvcache_blocks=2**31 // 48, **sizes) == 44_739_242
    assert num_blocks(Communicator(), num_kvcache_blocks=2**31 // 48 // 3, num_groups=3, **sizes) == 44_739_240
    with pytest.raises(ValueError, match="over the limit of 14913080 blocks of 48"):
        num_blocks(Communicator(), num_kvcache_blocks=14_913_081, num_groups=3, **sizes)
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=44739243 is over the limit of 44739242 blocks of 48"):
        num_blocks(Communicator(), num_kvcache_blocks=2**31 // 48 + 1, **sizes)
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=134217729 is over the limit of 134217728 .* 2147483648"):
        LLM(checkpoint, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=2**27 + 1)


def test_memory_for_more_slots_than_int32_counts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 2**40)
    assert num_blocks(Communicator(), block_bytes=64, kvcache_block_size=16) == 2**27


def test_ranks_on_the_cpu_share_what_one_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 3000)
    three = Communicator()
    three.size = 3
    assert num_blocks(Communicator(), block_bytes=100) == 30 and num_blocks(three, block_bytes=100) == 10


def test_a_cache_too_small_for_a_token_in_every_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"block_bytes": 2**28, "num_groups": 3}
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 3 * 2**28 - 1)
    with pytest.raises(ValueError, match=r"0\.75 GiB are left for the KV cache, less than one block of 0\.750 GiB"):
        num_blocks(Communicator(), **sizes)
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 3 * 2**28)
    assert num_blocks(Communicator(), **sizes) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_on_the_cpu_takes_memory_where_it_is_used() -> None:
    layer = Attention(2, 128, 1e-6, RotaryEmbedding(128, RopeConfig(1e4)))

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    group = CacheTensors.zeros(layer.kv_cache_spec(torch.bfloat16), 2, 2**16, 16, CPU)
    assert group.keys.nbytes == group.values.nbytes == 2**30 and resident_bytes() < before + 2**28
    assert not group.keys[:, -1].any() and not group.values[:, -1].any()


def test_layers_of_equal_specs_share_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = RotaryEmbedding(8, RopeConfig(1e4))
    layers = [Attention(heads, 8, 1e-6, rotary) for heads in (2, 1, 2)]
    specs = [layer.kv_cache_spec(torch.float32) for layer in layers]
    # Keys of another size than values, in another dtype.
    specs[1] = replace(specs[1], key_size=24, dtype=torch.float16)
    cache = KVCache(
        layers,
        specs,
        single_group(specs),
        SdpaBackend(16),
        torch.zeros(1, dtype=torch.int64),
        num_blocks=3,
        block_size=16,
    )
    assert [(*group.keys.shape, *group.values.shape[-2:]) for group in cache.tensors.values()] == [
        (2, 3, 16, 2, 8, 2, 8), (1, 3, 16, 1, 24, 1, 8),
    ]  # fmt: skip
    for group in cache.tensors.values():
        assert group.keys.is_contiguous() and group.values.is_contiguous()
        assert group.values.data_ptr() == group.keys.data_ptr() + group.keys.nbytes
    assert cache.block_bytes == 16 * (2 * 2 * 2 * 8 * 4 + (24 + 8) * 2) and cache.most_copied_bytes == 16 * 2 * 8 * 4
    for i, layer in enumerate(layers):
        layer.layer.pages.k_cache[1], layer.layer.pages.v_cache[1] = 2 * i + 1, 2 * i + 2
    cache.begin_step(ScheduledBatch(transfers=[BlockTransfer("copy", 1, 2)]))
    for i, layer in enumerate(layers):
        assert (layer.layer.pages.k_cache[2] == 2 * i + 1).all() and (layer.layer.pages.v_cache[2] == 2 * i + 2).all()
        assert not layer.layer.pages.k_cache[0].any() and not layer.layer.pages.v_cache[0].any()
    assert torch.equal(cache.tensors[specs[0]].keys[1], layers[2].layer.pages.k_cache)
    # Out to slots of the host's memory, and back in: what a step loads is what was there before it saves.
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", cache.block_bytes)
    cache.copies = BlockCopies(list(cache.stacks()), host_blocks.HostBlocks(3, cache.block_bytes, CPU))
    out, back = BlockTransfer("save", 1, 2), BlockTransfer("load", 2, 0)
    cache.load_and_save(ScheduledBatch(transfers=[out]))
    for page in cache.pages():
        page[1] = 0
    cache.load_and_save(ScheduledBatch(transfers=[back, out]))
    cache.load_and_save(ScheduledBatch(transfers=[BlockTransfer("load", 2, 2)]))
    for i, layer in enumerate(layers):
        assert (layer.layer.pages.k_cache[0] == 2 * i + 1).all() and (layer.layer.pages.v_cache[0] == 2 * i + 2).all()
        assert not layer.layer.pages.k_cache[2].any() and not layer.layer.pages.v_cache[2].any()
    cache.unbind()
    assert not any(hasattr(layer, "layer") for layer in layers)


def test_block_tables_whose_offsets_are_no_int32_are_refused(checkpoint: Path) -> None:
    # 16 slots with one for padding, and 6 elements besides.
    widest = 2**31 // 16 - 6
    assert SlotState(15, widest, 1, META).size == 2**31
    with pytest.raises(ValueError, match=f"15 running sequences, with block tables of {widest + 1} .* of 2147483648"):
        SlotState(15, widest + 1, 1, META)
    many: dict[str, Any] = {"max_num_seqs": 2**27, "max_num_batched_tokens": 2**27}
    with pytest.raises(ValueError, match=r"134217728 running sequences, with block tables of 16 entries"):
        LLM(checkpoint, device="cpu", max_model_len=256, kvcache_block_size=16, num_kvcache_blocks=9, **many)
