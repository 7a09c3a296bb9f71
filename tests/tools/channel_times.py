"""Time from rank 0's write of a step to the last rank's read of it.

Run with `python -m tests.tools.channel_times [READERS]`.

Not a test: nothing is asserted. It means something where each process has a core.
"""

from __future__ import annotations

import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

from nanovllm.parallel.channel import Receiver, Sender
from nanovllm.runner.messages import ScheduledBatch
from tests.mock_runner import slot_rows

MESSAGES = 2000
PAUSE_SECONDS = 0.0005
"""As long as a short step; longer than it takes to read."""


def read(descriptor: int, reports: Connection) -> None:
    """Note when each message has been read."""
    reports.send([])
    receiver, times = Receiver(descriptor), []
    for _ in range(MESSAGES):
        receiver.receive()
        times.append(time.monotonic_ns())
    reports.send(times)


def main() -> None:
    """Print the median and the 99th percentile, for a step told as "again" and for one of 256 decode rows."""
    num_readers = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    context = get_context("fork")
    for name, batch in (
        ("again", ScheduledBatch()),
        ("256 rows", ScheduledBatch(rows=slot_rows(*range(256)))),
    ):
        channel, pipes, readers = Sender(num_readers), [], []
        for reader in range(num_readers):
            receiver, sender = context.Pipe(duplex=False)
            readers.append(context.Process(target=read, args=(channel.receivers[reader], sender)))
            readers[-1].start()
            pipes.append(receiver)
        for pipe in pipes:
            pipe.recv()
        sent = []
        for _ in range(MESSAGES):
            time.sleep(PAUSE_SECONDS)
            sent.append(time.monotonic_ns())
            channel.send(batch, lambda: None)
        last = [max(times) for times in zip(*(pipe.recv() for pipe in pipes), strict=True)]
        delays = sorted((after - before) / 1e3 for before, after in zip(sent, last, strict=True))
        median, high = statistics.median(delays), delays[int(0.99 * MESSAGES)]
        print(f"{num_readers} readers, {name}: median {median:.1f} us, 99% within {high:.1f} us")
        for process in readers:
            process.join()
        channel.close()


if __name__ == "__main__":
    main()
