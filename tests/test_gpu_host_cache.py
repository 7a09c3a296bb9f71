"""Blocks that leave a GPU for the host's memory and come back. Run with `pytest -m gpu`.

`compute-sanitizer --tool memcheck python -m pytest -m gpu tests/test_gpu_host_cache.py -k copies` checks its addresses.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.runner import host_blocks
from nanovllm.runner.host_blocks import CudaBlockCopies, HostBlocks
from nanovllm.runner.messages import BlockTransfer, NewRequest, ScheduledBatch
from tests.conftest import MakeCheckpoint
from tests.test_gpu import SHAPE
from tests.test_host_cache import pins_at_most, save_all_blocks

pytestmark = pytest.mark.gpu

NUM_BLOCKS, NUM_SLOTS, PAGE = 24, 40, 2**18
SPIN = 2_000_000
"""Cycles that a step computes at least: longer than its copies take, and shorter than a few steps' copies."""


class Steps:
    """Steps that fill blocks with numbers of their own and read them, late, on the stream that computes.

    Args:
        copies: of the stacks.
        stacks: [layers, blocks, bytes] each.
    """

    def __init__(self, copies: CudaBlockCopies, stacks: list[torch.Tensor]) -> None:
        self.copies = copies
        self.pages = [page for stack in stacks for page in stack]
        self.in_block: dict[int, int] = {}
        self.in_slot: dict[int, int] = {}
        self.read: list[tuple[torch.Tensor, int]] = []
        self.count = 0

    def run(self, fill: list[int], transfers: list[BlockTransfer], look: list[int], waits: bool) -> None:
        """Do a step: load and save; fill blocks, and read others."""
        batch = ScheduledBatch(
            new_requests=[NewRequest(0, [fill], 1, 0.0, 0)], transfers=transfers, waits_for_loads=waits
        )
        self.copies.begin_step(batch)
        if transfers:
            self.copies.queue(transfers)
        if waits:
            self.copies.wait_for_loads()
        before = dict(self.in_block)
        for move in transfers:
            if move.kind == "load":
                self.in_block[move.destination] = self.in_slot[move.source]
        for move in transfers:
            if move.kind == "save":
                self.in_slot[move.destination] = before[move.source]
        for block in fill:
            self.count += 1
            self.in_block[block] = self.count
            for number, page in enumerate(self.pages):
                page[block].fill_((self.count + number) % 251)
        torch.cuda._sleep(SPIN)
        for block in look:
            for number, page in enumerate(self.pages):
                expected = (self.in_block[block] + number) % 251
                self.read.append(((page[block] != expected).sum(), block))

    def check(self) -> None:
        torch.cuda.synchronize()
        assert not [block for wrong, block in self.read if wrong.item()]


@pytest.mark.filterwarnings("ignore:pinned memory of swap_space ends at 16 blocks:UserWarning")
@pytest.mark.parametrize("most_pinned", [NUM_SLOTS, 16])
def test_copies_are_right_while_steps_write_and_read(most_pinned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 16 * 2**20)
    pins_at_most(most_pinned * 8 * PAGE, monkeypatch)
    device, rng = torch.device("cuda", torch.cuda.current_device()), random.Random(0)
    shapes = (2, 1), (1, 2), (1, 4)
    stacks = [torch.zeros(n, NUM_BLOCKS, PAGE * size, dtype=torch.uint8, device=device) for n, size in shapes]
    # A step begins when the device has finished with what the pages were before.
    torch.cuda.synchronize()
    copies = CudaBlockCopies(stacks, HostBlocks(NUM_SLOTS, 8 * PAGE, device))
    steps, loaded = Steps(copies, stacks), list[int]()
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        steps.run(list(range(NUM_BLOCKS)), [], [], False)
        for _ in range(100):
            blocks, slots = rng.sample(range(NUM_BLOCKS), 12), rng.sample(range(NUM_SLOTS), 8)
            loads = [
                BlockTransfer("load", slot, block)
                for slot, block in zip(slots[:4], blocks[:4], strict=True)
                if slot in steps.in_slot
            ]
            # What is loaded now, or was by the step before, is not saved yet.
            free = [block for block in blocks[4:8] if block not in loaded]
            saves = [BlockTransfer("save", block, slot) for block, slot in zip(free, slots[4:], strict=False)]
            waits = rng.random() < 0.3
            now = [move.destination for move in loads]
            look = [block for block in range(NUM_BLOCKS) if waits or block not in now]
            steps.run(blocks[8:], loads + saves, look, waits)
            loaded = now
    steps.check()
    copies.close()


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_are_those_of_an_engine_without(make_checkpoint: MakeCheckpoint, eager: bool) -> None:
    folder: Path = make_checkpoint(**SHAPE)
    rng = random.Random(0)
    whole = [[rng.randrange(1000) for _ in range(300)] for _ in range(12)]
    documents = [[*document[: rng.choice([200, 300])], rng.randrange(1000)] for document in whole * 3]
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "max_model_len": 512, "kvcache_block_size": 16, "num_kvcache_blocks": 100,
        "max_num_batched_tokens": 256, "max_num_seqs": 16, "enforce_eager": eager,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(documents, params, use_tqdm=False, schedule="arrival")
        return [output["token_ids"] for output in outputs]

    with LLM(folder, **settings) as llm:
        want = answers(llm)
    with LLM(folder, swap_space=0.25, **settings) as llm:
        save_all_blocks(llm)
        for _ in range(3):
            assert answers(llm) == want
        stats = llm.stats()
        assert stats["num_loaded_blocks"] > 200 and stats["num_saved_blocks"] > 200 and stats["num_preemptions"]


def test_memory_is_given_back_and_an_exit_waits_for_copies(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(**SHAPE)
    for _ in range(2):
        with LLM(folder, device="cuda", swap_space=3.0, num_kvcache_blocks=64, max_model_len=512) as llm:
            while not llm.stats()["num_saved_blocks"]:
                # Memory is pinned beside the steps, and may take longer than some requests.
                if llm.is_finished():
                    for start in range(20):
                        llm.add_request([start] * 400, SamplingParams(temperature=0, max_tokens=50))
                llm.step()
