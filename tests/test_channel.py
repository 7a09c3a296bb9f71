"""The ring: every message whole, in order and to every reader, whatever its size and however slow they are."""

from __future__ import annotations

import os
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine.channel import Channel
from nanovllm.engine.messages import PromptChunk, ScheduledBatch, SlotJoin

# Several processes each, on as many cores as there are.
pytestmark = pytest.mark.xdist_group("ranks")


def never() -> None:
    pass


class Reader(threading.Thread):
    """Takes messages until None comes."""

    def __init__(self, channel: Channel, number: int, seconds_each: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.channel, self.number, self.seconds_each = channel, number, seconds_each
        self.messages: list[Any] = []
        self.start()

    def run(self) -> None:
        while (message := self.channel.receive(self.number)) is not None:
            self.messages.append(message)
            time.sleep(self.seconds_each)


@pytest.mark.parametrize("capacity", [64, 101, 4096])
def test_many_messages_to_three_readers(capacity: int) -> None:
    channel = Channel(3, capacity)
    readers = [Reader(channel, number) for number in range(3)]
    sent = [("message", i, "x" * (i % 90)) for i in range(1000)]
    for message in [*sent, None]:
        channel.send(message, never)
    for reader in readers:
        reader.join(20)
        assert reader.messages == sent
    channel.close()


def test_a_batch_comes_out_as_it_went_in() -> None:
    channel = Channel(1)
    batch = ScheduledBatch(
        joins=[SlotJoin(3, [1, 2], 30, 0.5, 2**64 - 1)],
        decode_slots=[0, 7],
        chunks=[PromptChunk(3, 0, array("i", range(100000, 100030)), True, True)],
    )
    channel.send(batch, never)
    assert channel.receive(0) == batch
    channel.close()


def test_a_message_larger_than_the_ring_goes_in_pieces() -> None:
    channel = Channel(2, capacity=1000)
    readers = [Reader(channel, 0), Reader(channel, 1, 0.001)]
    sent = [os.urandom(100_000), list(range(30_000)), b""]
    for message in [*sent, None]:
        channel.send(message, never)
    for reader in readers:
        reader.join(20)
        assert reader.messages == sent
    channel.close()


def test_nothing_is_overwritten_before_the_slowest_has_read_it() -> None:
    channel = Channel(2, capacity=256)
    fast = Reader(channel, 0)
    sent = [bytes([i]) * 60 for i in range(20)]

    def write() -> None:
        for message in [*sent, None]:
            channel.send(message, never)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.3)
    # The other reader has not begun, so the ring is full and the writer waits.
    assert writer.is_alive() and 1 <= len(fast.messages) <= 4
    slow = Reader(channel, 1, 0.005)
    for thread in (writer, fast, slow):
        thread.join(20)
    assert fast.messages == slow.messages == sent
    channel.close()


def test_waiting_for_a_reader_that_is_gone_ends_with_what_the_check_raises() -> None:
    channel = Channel(1, capacity=64)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("reader 0 is gone")

    started = time.monotonic()
    with pytest.raises(ConnectionError, match="reader 0 is gone"):
        channel.send(bytes(65), check)
    assert time.monotonic() - started < 2
    channel.close()


def test_an_idle_reader_sleeps() -> None:
    channel = Channel(1)
    reader = Reader(channel, 0)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
    channel.send(None, never)
    reader.join(5)
    assert not reader.is_alive()
    channel.close()


def test_the_memory_has_no_name_and_goes_with_its_channel() -> None:
    shm = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")
    before = set(os.listdir(shm))
    channel = Channel(7)
    assert set(os.listdir(shm)) <= before
    descriptor = channel.descriptor
    channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
