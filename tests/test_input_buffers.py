"""What a batch sends to the device, and what of it the device then has."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from nanovllm.engine.input_buffers import InputBuffers, StagedStep, StepInputs, StepShape
from nanovllm.engine.messages import NewBlock, PromptChunk, ScheduledBatch, SlotJoin
from nanovllm.kernels.slot_state import BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, NUM_PROMPT

BLOCK_SIZE = 16
PADDING_SLOT = 4


class Sender:
    """Buffers of four slots that note how many numbers each step sends."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self.buffers = InputBuffers(PADDING_SLOT, 6, BLOCK_SIZE, 64, 0, 1, lambda context_lens: False, device)
        self.sent: list[int] = []
        self._send = self.buffers._staging.send
        self.buffers._staging.send = self._counted_send  # type: ignore[method-assign]

    def _counted_send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        self.sent.append(sum(map(len, parts)))
        return self._send(parts)

    def stage(self, batch: ScheduledBatch, shape: StepShape | None = None) -> StagedStep:
        exact = self.buffers.shape_of(batch)
        return self.buffers.stage(batch, shape or exact)

    def step(self, batch: ScheduledBatch, shape: StepShape | None = None, token: int = 7) -> StepInputs:
        """Run a step whose every sampled token is `token`."""
        inputs = self.buffers.assemble(self.stage(batch, shape))
        num_samples = len(inputs.sample_slots)
        sampled = torch.zeros(num_samples, dtype=torch.int64)
        self.buffers.scatter(inputs, torch.full((num_samples,), token), sampled)
        return inputs


@pytest.fixture
def sender() -> Sender:
    """Slots 0, 1 and 2 hold sequences of 17 prompt tokens each, computed and stored in two blocks of their own."""
    sender = Sender()
    batch = ScheduledBatch(
        joins=[SlotJoin(slot, [10 + slot, 20 + slot], 17, 0.5, 1) for slot in range(3)],
        chunks=[PromptChunk(slot, 0, array("i", range(17)), True, True) for slot in range(3)],
    )
    sender.step(batch)
    sender.sent.clear()
    return sender


def test_decode_slots_are_sent_when_they_change_and_not_again(sender: Sender) -> None:
    batches = [[0, 2], [0, 2], [0, 2], [2, 0], [0, 2], [2], [2]]
    for position, slots in enumerate(batches):
        inputs = sender.step(ScheduledBatch(decode_slots=slots))
        assert inputs.sample_slots.tolist() == slots
        assert inputs.positions[slots.index(2)] == 17 + position
    assert sender.sent == [2, 0, 0, 2, 2, 1, 0]
    # The same slots, with padding that was not there before.
    sender.step(ScheduledBatch(decode_slots=[0, 2]), StepShape(3))
    sender.step(ScheduledBatch(decode_slots=[0, 2]), StepShape(3))
    assert sender.sent[-2:] == [3, 0]


def test_a_new_block_is_one_number(sender: Sender) -> None:
    sender.step(ScheduledBatch(decode_slots=[1]))
    inputs = sender.step(ScheduledBatch(new_blocks=[NewBlock(1, 2, 5)], decode_slots=[1]))
    # Its place and its value.
    assert sender.sent == [1, 2]
    assert inputs.context.block_tables.tolist() == [[11, 21, 5, 0, 0, 0]]


def test_padding_rows_store_nothing_and_change_no_slot(sender: Sender) -> None:
    state = sender.buffers.state
    before = state.clone()
    batch = ScheduledBatch(decode_slots=[2], chunks=[PromptChunk(3, 0, array("i", [50, 51]), True, False)],
                           joins=[SlotJoin(3, [13], 9, 0.0, 0)])  # fmt: skip
    inputs = sender.step(batch, StepShape(num_decodes=3, num_tokens=5, num_chunks=3), token=99)
    assert inputs.context.kv_slots.tolist() == [22 * 16 + 1, -1, -1, 13 * 16, 13 * 16 + 1, -1, -1, -1]
    assert inputs.context.context_lens.tolist()[:1] == [18]
    # Neither padding nor the chunk, which does not end its prompt, is sampled for.
    assert inputs.sample_slots.tolist() == [2, 4, 4, 4, 4, 4]
    assert torch.equal(state[:2], before[:2])
    assert state[2, [LAST_TOKEN, NUM_COMPUTED]].tolist() == [99, 18]
    assert state[3, [LAST_TOKEN, NUM_COMPUTED, NUM_PROMPT, BLOCK_TABLE]].tolist() == [0, 2, 9, 13]
    # The padding slot takes their tokens, and keeps the position 0 of its only context.
    assert state[PADDING_SLOT, [LAST_TOKEN, NUM_COMPUTED]].tolist() == [99, 0]


def test_a_token_that_is_stored_already_has_no_place_on_the_device(sender: Sender) -> None:
    batch = ScheduledBatch(
        joins=[SlotJoin(3, [10, 11], 32, 0.0, 0)],
        decode_slots=[0],
        chunks=[PromptChunk(3, 31, array("i", [60]), store=False, samples=True)],
    )
    inputs = sender.step(batch)
    assert inputs.context.kv_slots.tolist() == [20 * 16 + 1, -1]
    # It attends to all before it, and to itself, all the same.
    assert inputs.context.context_lens.tolist() == [18, 32] and inputs.positions.tolist() == [17, 31]
    assert inputs.context.block_tables[1].tolist() == [10, 11, 0, 0, 0, 0]
