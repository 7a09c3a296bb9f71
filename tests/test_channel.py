"""The ring: every message whole, in order and to every reader, whatever its size and however slow they are."""

from __future__ import annotations

import os
import pickle
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.runner.messages import NewRequest, PromptChunk, ScheduledBatch
from nanovllm.workers.channel import Channel
from tests.mock_runner import slot_array

# Several processes each, on as many cores as there are.


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
        new_requests=[NewRequest(3, [1, 2], 30, 0.5, 2**64 - 1)],
        decode_slots=slot_array(0, 7),
        chunks=[PromptChunk(3, 0, array("i", range(100000, 100030)), True, True)],
    )
    channel.send(batch, never)
    assert repr(channel.receive(0)) == repr(batch)
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


def unanswered() -> None:
    raise AssertionError("waits for what nobody will do")


class Watched:
    """A view of shared memory that calls `after_write(index)` as soon as an item or a slice of it is written."""

    def __init__(self, view: memoryview, after_write: Callable[[Any], None]) -> None:
        self.view, self.after_write, self.release = view, after_write, view.release

    def __getitem__(self, index: Any) -> Any:
        return self.view[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.view[index] = value
        self.after_write(index)


# In one piece, around the end of the ring, and in pieces of a ring too small for it.
@pytest.mark.parametrize("capacity", [4096, 640, 100])
def test_a_reader_that_looks_at_once_sees_no_torn_message(capacity: int) -> None:
    """It copies what the writer's counter promises at the moment when the counter is raised."""
    channel = Channel(1, capacity)
    read = bytearray()

    def look(index: int) -> None:
        # The reader's own counter lies in the next line; to raise it comes back here.
        if index == 0:
            while len(read) < counters.view[0]:
                read.append(data[len(read) % capacity])
            counters[8] = len(read)

    counters, data = Watched(channel._counters, look), channel._data
    channel._counters = counters  # type: ignore[assignment]
    sent = [bytes(range(200)), bytes(reversed(range(256))) * 2]
    for message in sent:
        channel.send(message, unanswered)
    stream = b"".join(len(packed).to_bytes(8, "little") + packed for packed in (pickle.dumps(m, 5) for m in sent))
    assert bytes(read) == stream
    channel.close()


@pytest.mark.parametrize("capacity", [4096, 640])
def test_a_writer_that_writes_at_once_tears_no_message(capacity: int) -> None:
    """It overwrites what a reader's counter says is read, at the moment when the counter is raised."""
    channel = Channel(1, capacity)
    freed = 0

    def overwrite(index: int) -> None:
        nonlocal freed
        while index == 8 and freed < counters.view[8]:
            channel._data[freed % capacity] = 0xAA
            freed += 1

    counters = Watched(channel._counters, overwrite)
    channel._counters = counters  # type: ignore[assignment]
    # The third goes around the end of the smaller ring.
    for message in (bytes(range(200)), "x" * 300, bytes(range(250))):
        channel.send(message, unanswered)
        assert channel.receive(0, unanswered) == message
    assert freed == channel._written
    channel.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system in memory")
def test_the_memory_is_there_from_the_start() -> None:
    """A full file system says so to the constructor; of a file that is only sized, pages are found missing later."""
    channel = Channel(2, capacity=2**20)
    assert os.fstat(channel.descriptor).st_blocks * 512 >= 2**20
    channel.close()


def test_the_memory_has_no_name_and_goes_with_its_channel() -> None:
    channel = Channel(7)
    descriptor = channel.descriptor
    assert os.fstat(descriptor).st_nlink == 0
    channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
