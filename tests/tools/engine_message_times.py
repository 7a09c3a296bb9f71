"""What it costs to send the tokens of a step to a front end: `python -m tests.tools.engine_message_times`.

Compares socket pairs with pickle, as `nanovllm.client` has them, with ZeroMQ and msgspec's MessagePack, which must be
installed for this alone. Prints microseconds a message, from one process to another and back, for steps of so many
rows; the answer is a message without tokens.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.client.messages import StepReport

ROUNDS = 2000
Ends = tuple[Callable[[Any], None], Callable[[], Any]]


def pipe_ends(connection: Connection) -> Ends:
    return connection.send, connection.recv


def zmq_ends(address: str, *, binds: bool) -> Ends:
    zmq, msgspec = importlib.import_module("zmq"), importlib.import_module("msgspec")
    socket = zmq.Context().socket(zmq.PAIR)
    (socket.bind if binds else socket.connect)(address)
    return lambda message: socket.send(msgspec.msgpack.encode(message)), lambda: msgspec.msgpack.decode(socket.recv())


def answer(kind: str, place: Any) -> None:
    send, receive = pipe_ends(place) if kind == "pipe" else zmq_ends(place, binds=False)
    while receive() is not None:
        send(1)


def measure(kind: str, rows: int) -> float:
    """Return microseconds a message."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        own, other = context.Pipe()
        address = f"ipc://{folder}/socket"
        send, receive = pipe_ends(own) if kind == "pipe" else zmq_ends(address, binds=True)
        process = context.Process(target=answer, args=(kind, other if kind == "pipe" else address))
        process.start()
        tokens = [(i, 0, i * 7, False, b"") for i in range(rows)]
        stats = {f"num_{i}": i for i in range(9)}
        report: Any = StepReport(tokens, stats=stats) if kind == "pipe" else {"tokens": tokens, "stats": stats}
        best = float("inf")
        for turn in range(5):
            started = time.perf_counter()
            for _ in range(ROUNDS if turn else 10):
                send(report)
                receive()
            best = min(best, (time.perf_counter() - started) / ROUNDS) if turn else best
        send(None)
        process.join()
    return best * 1e6


if __name__ == "__main__":
    for num_rows in (1, 64, 256):
        times = {name: measure(name, num_rows) for name in ("pipe", "zmq")}
        shown = f"socket pair and pickle {times['pipe']:.0f} us, ZeroMQ and msgspec {times['zmq']:.0f} us"
        print(f"{num_rows:4d} rows: {shown}")
