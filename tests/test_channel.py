"""The channel: every message whole, in order and to every receiver, whatever its size and however slow they are."""

from __future__ import annotations

import os
import threading
import time
from array import array
from typing import Any

import pytest

from nanovllm.parallel.channel import Receiver, Sender
from nanovllm.runner.messages import Chunk, NewRequest, ScheduledBatch
from tests.mock_runner import slot_rows


def never() -> None:
    pass


class Reader(threading.Thread):
    """Takes messages until None comes."""

    def __init__(self, sender: Sender, number: int, seconds_each: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.receiver, self.seconds_each = Receiver(sender.receivers[number]), seconds_each
        self.messages: list[Any] = []
        self.start()

    def run(self) -> None:
        while (message := self.receiver.receive()) is not None:
            self.messages.append(message)
            time.sleep(self.seconds_each)


@pytest.mark.parametrize(
    "sent",
    [
        [("message", i, "x" * (i % 90)) for i in range(1000)],
        # Larger than a pipe.
        [os.urandom(3_000_000), list(range(300_000)), b""],
    ],
    ids=["many", "large"],
)
def test_every_receiver_gets_every_message(sent: list[Any]) -> None:
    sender = Sender(3)
    readers = [Reader(sender, 0), Reader(sender, 1, 0.001), Reader(sender, 2)]
    for message in [*sent, None]:
        sender.send(message, never)
    for reader in readers:
        reader.join(20)
        assert reader.messages == sent
    sender.close()


def test_a_batch_comes_out_as_it_went_in() -> None:
    sender = Sender(1)
    batch = ScheduledBatch(
        new_requests=[NewRequest(3, [[1, 2]], 30, 0.5, 2**64 - 1)],
        rows=slot_rows(0, 7),
        chunks=[Chunk(3, 0, array("i", range(100000, 100030)), True, True)],
    )
    sender.send(batch, never)
    assert repr(Receiver(sender.receivers[0]).receive()) == repr(batch)
    sender.close()


def test_the_others_get_what_one_does_not_read() -> None:
    sender = Sender(2)
    fast = Reader(sender, 1)
    sent = [bytes([i]) * 300_000 for i in range(20)]

    def write() -> None:
        for message in [*sent, None]:
            sender.send(message, never)

    writer = threading.Thread(target=write)
    writer.start()
    deadline = time.monotonic() + 20
    while not fast.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    # The other receiver has not begun, so its pipe is full and the writer waits.
    assert writer.is_alive() and 1 <= len(fast.messages) < 20
    slow = Reader(sender, 0, 0.005)
    for thread in (writer, fast, slow):
        thread.join(20)
    assert fast.messages == slow.messages == sent
    sender.close()


def test_waiting_for_a_lost_receiver_raises_what_the_check_does() -> None:
    sender = Sender(1)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("reader 0 is gone")

    with pytest.raises(ConnectionError, match="reader 0 is gone"):
        sender.send(bytes(2**22), check)
    sender.close()


def test_a_receiver_waits_with_its_check_and_ends_with_its_sender() -> None:
    sender = Sender(1)
    receiver = Receiver(os.dup(sender.receivers[0]))

    def check() -> None:
        raise ConnectionError("the device is lost")

    with pytest.raises(ConnectionError, match="device is lost"):
        receiver.receive(check)
    sender.send("last", never)
    descriptors = [*sender.receivers, *sender._writers]
    sender.close()
    assert receiver.receive() == "last"
    with pytest.raises(EOFError):
        receiver.receive()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_idle_receiver_sleeps() -> None:
    sender = Sender(1)
    reader = Reader(sender, 0)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
    sender.send(None, never)
    reader.join(5)
    assert not reader.is_alive()
    sender.close()
