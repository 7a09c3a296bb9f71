"""The copy of a batch to the device, and the tensors that the device then has."""

from __future__ import annotations

from array import array
from copy import deepcopy

import numpy as np
import pytest
import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.kernels.slot_tensors import scatter_tokens
from nanovllm.runner.batch import BatchBuilder, DeviceStep, StepInputs, StepShape
from nanovllm.runner.messages import Chunk, NewBlock, NewRequest, ScheduledBatch
from tests.mock_runner import slot_rows

BLOCK_SIZE = 16
PADDING_SLOT = 4


class Sender:
    """Buffers of four slots that note how many numbers each step sends."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self.builder = BatchBuilder(PADDING_SLOT, 6, BLOCK_SIZE, 64, SdpaBackend(BLOCK_SIZE), device, num_groups=1)
        self.sent: list[int] = []
        self._send = self.builder._staging.send
        self.builder._staging.send = self._counted_send  # type: ignore[method-assign]

    def _counted_send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        self.sent.append(sum(map(len, parts)))
        return self._send(parts)

    def send(self, batch: ScheduledBatch, shape: StepShape | None = None) -> DeviceStep:
        exact, plan = self.builder.plan(batch)
        return self.builder.send(batch, shape or exact, plan)

    def step(self, batch: ScheduledBatch, shape: StepShape | None = None, token: int = 7) -> StepInputs:
        """Run a step whose every sampled token is `token`."""
        inputs = self.builder.gather(self.send(batch, shape))
        slots = inputs.sample_slots
        token_ids, sampled = torch.full((len(slots),), token), torch.zeros(len(slots), dtype=torch.int64)
        scatter_tokens(self.builder.slots.tensors, slots, token_ids, inputs.metadata.num_decodes, sampled)
        return inputs


@pytest.fixture
def sender() -> Sender:
    """Slots 0, 1 and 2 hold sequences of 17 prompt tokens each, computed and stored in two blocks of their own."""
    sender = Sender()
    batch = ScheduledBatch(
        new_requests=[NewRequest(slot, [[10 + slot, 20 + slot]], 17, 0.5, 1) for slot in range(3)],
        chunks=[Chunk(slot, 0, array("i", range(17)), True, True) for slot in range(3)],
    )
    sender.step(batch)
    sender.sent.clear()
    return sender


def test_decode_slots_are_sent_when_they_change_and_not_again(sender: Sender) -> None:
    batches = [[0, 2], [0, 2], [0, 2], [2, 0], [0, 2], [2], [2]]
    for position, slots in enumerate(batches):
        inputs = sender.step(ScheduledBatch(rows=slot_rows(*slots)))
        assert inputs.sample_slots.tolist() == slots
        assert inputs.positions[slots.index(2)] == 17 + position
    assert sender.sent == [2, 0, 0, 2, 2, 1, 0]
    # The same slots, with padding that was not there before.
    sender.step(ScheduledBatch(rows=slot_rows(0, 2)), StepShape(3))
    sender.step(ScheduledBatch(rows=slot_rows(0, 2)), StepShape(3))
    assert sender.sent[-2:] == [3, 0]


def test_a_new_block_is_one_number(sender: Sender) -> None:
    sender.step(ScheduledBatch(rows=slot_rows(1)))
    inputs = sender.step(ScheduledBatch(new_blocks=[NewBlock(1, 2, 5)], rows=slot_rows(1)))
    # Its place and its value.
    assert sender.sent == [1, 2]
    assert inputs.metadata.block_tables[0].tolist() == [[11, 21, 5, 0, 0, 0]]


def test_padding_rows_store_nothing_and_change_no_slot(sender: Sender) -> None:
    state = sender.builder.slots.tensors
    before = deepcopy(state)
    batch = ScheduledBatch(rows=slot_rows(2), chunks=[Chunk(3, 0, array("i", [50, 51]), True, False)],
                           new_requests=[NewRequest(3, [[13]], 9, 0.0, 0)])  # fmt: skip
    inputs = sender.step(batch, StepShape(num_decodes=3, num_prompt_tokens=5, num_chunks=3), token=99)
    assert inputs.metadata.slot_mappings[0].tolist() == [22 * 16 + 1, -1, -1, 13 * 16, 13 * 16 + 1, -1, -1, -1]
    assert inputs.metadata.seq_lens.tolist()[:1] == [18]
    # Neither padding nor the chunk, which does not end its prompt, is sampled for.
    assert inputs.sample_slots.tolist() == [2, 4, 4, 4, 4, 4]
    for name, tensor in vars(state).items():
        assert torch.equal(tensor[:2], getattr(before, name)[:2]), name
    # The padding slot takes their tokens, and keeps the position 0 of its only context.
    assert state.last_token[2:].tolist() == [99, 0, 99] and state.num_computed[2:].tolist() == [18, 2, 0]
    assert state.num_prompt[3] == 9 and state.block_tables[3].tolist() == [[13, 0, 0, 0, 0, 0]]


def test_a_token_that_is_stored_already_has_no_place_on_the_device(sender: Sender) -> None:
    batch = ScheduledBatch(
        new_requests=[NewRequest(3, [[10, 11]], 32, 0.0, 0)],
        rows=slot_rows(0),
        chunks=[Chunk(3, 31, array("i", [60]), store=False, samples=True)],
    )
    inputs = sender.step(batch)
    assert inputs.metadata.slot_mappings[0].tolist() == [20 * 16 + 1, -1]
    # It attends to all before it, and to itself, all the same.
    assert inputs.metadata.seq_lens.tolist() == [18, 32] and inputs.positions.tolist() == [17, 31]
    assert inputs.metadata.block_tables[0][1].tolist() == [10, 11, 0, 0, 0, 0]


def test_sampling_parameters_reach_their_rows_bit_for_bit(sender: Sender) -> None:
    temperatures, seeds = [0.7, 1e39], [2**64 - 1, 5 + 2**32]
    requests = [NewRequest(slot, [[13 + slot]], 3, temperatures[slot], seeds[slot]) for slot in range(2)]
    chunks = [Chunk(slot, 0, array("i", [1, 2, 3]), True, True) for slot in range(2)]
    mixed = sender.step(ScheduledBatch(new_requests=requests, chunks=chunks, rows=slot_rows(2))).sampling
    decodes = sender.step(ScheduledBatch(rows=slot_rows(1, 2, 0))).sampling
    hottest = torch.tensor(1e30).item()
    assert mixed.temperatures.tolist() == [0.5, torch.tensor(0.7).item(), hottest]
    assert mixed.seeds.tolist() == [[1, 0], [-1, -1], [5, 1]] and mixed.output_index.tolist() == [1, 0, 0]
    assert decodes.temperatures.tolist() == [hottest, 0.5, torch.tensor(0.7).item()]
    assert decodes.seeds.tolist() == [[5, 1], [1, 0], [-1, -1]] and decodes.output_index.tolist() == [1, 2, 1]
