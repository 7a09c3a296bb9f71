"""Copies between device and host, on streams that run what is queued in any order; and what the driver is asked for."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from nanovllm.runner import host_blocks
from nanovllm.runner.host_blocks import BlockCopies, CudaBlockCopies
from nanovllm.runner.messages import BlockTransfer, NewRequest, ScheduledBatch
from nanovllm.utils import device

NUM_BLOCKS = NUM_SLOTS = 6


class Event:
    """The device's; `recorded` counts what was queued, and `reached` what has been done."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.queue.append(Work(lambda: setattr(self, "reached", max(self.reached, number))))

    def wait(self, stream: Stream | None = None) -> None:
        number, stream = self.recorded, stream or Stream.current
        stream.queue.append(Work(lambda: None, lambda: self.reached >= number))

    def query(self) -> bool:
        return self.reached >= self.recorded


class Work(NamedTuple):
    """An action of a stream, which runs once it may."""

    run: Callable[[], object]
    may_run: Callable[[], bool] = lambda: True


class Stream:
    """A stream of the device; `current` has what is queued on none in particular."""

    current: Stream
    streams: list[Stream]
    rng: random.Random

    def __init__(self, *_: object, **__: object) -> None:
        self.queue = deque[Work]()
        self.streams.append(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        other.record_event().wait(self)

    def synchronize(self) -> None:
        while self.queue:
            run_some(1)


@contextmanager
def use(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


def run_some(most: int) -> None:
    for _ in range(most):
        ready = [stream for stream in Stream.streams if stream.queue and stream.queue[0].may_run()]
        if not ready:
            assert not any(stream.queue for stream in Stream.streams), "streams wait for each other"
            return
        Stream.rng.choice(ready).queue.popleft().run()


@dataclass
class Memory:
    """A block or slot: one number. Copies read first, and write later."""

    value: int = -1
    read: deque[int] = field(default_factory=deque)


def copy(destination: Memory, source: Memory) -> None:
    Stream.current.queue.append(Work(lambda: destination.read.append(source.value)))
    Stream.current.queue.append(Work(lambda: setattr(destination, "value", destination.read.popleft())))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaBlockCopies, list[Memory], list[Memory]]:
    """Copies on the streams above, blocks, and slots."""
    for name, replaced in {"Stream": Stream, "Event": Event, "stream": use}.items():
        monkeypatch.setattr(torch.cuda, name, replaced)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.streams[0])
    blocks, slots = [Memory() for _ in range(NUM_BLOCKS)], [Memory() for _ in range(NUM_SLOTS)]
    monkeypatch.setattr(BlockCopies, "_pages", lambda self, block, content: [(blocks[block], content)])
    monkeypatch.setattr(host_blocks, "copy_rows", copy)
    Stream.streams = []
    Stream.current = Stream()
    host: Any = SimpleNamespace(block_bytes=1, slot=slots.__getitem__, close=lambda: None)
    return CudaBlockCopies([torch.zeros(1, 1, 8)], host), blocks, slots


@pytest.mark.parametrize("seed", range(100))
def test_steps_find_what_was_saved_and_loaded(
    seed: int, copies: tuple[CudaBlockCopies, list[Memory], list[Memory]]
) -> None:
    made, blocks, slots = copies
    rng = Stream.rng = random.Random(seed)
    in_block, in_slot, loaded = dict.fromkeys(range(NUM_BLOCKS), -1), dict[int, int](), set[int]()
    wrong: list[tuple[int, int]] = []

    def check(block: int, expected: int) -> None:
        if blocks[block].value != expected:
            wrong.append((block, expected))

    for step in range(14):
        order, free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), rng.sample(range(NUM_SLOTS), NUM_SLOTS)
        num_loads, num_saves = rng.randrange(4), rng.randrange(4)
        known = [slot for slot in free[:num_loads] if slot in in_slot]
        loads = [BlockTransfer("load", slot, block) for slot, block in zip(known, order, strict=False)]
        # What is loaded now, or was by the step before, is not saved yet.
        saved = [block for block in order[num_loads : num_loads + num_saves] if block not in loaded]
        saves = [BlockTransfer("save", block, slot) for block, slot in zip(saved, reversed(free), strict=False)]
        fill, waits = order[num_loads + num_saves :], rng.random() < 0.3
        given = [*fill, *(load.destination for load in loads)]
        made.begin_step(ScheduledBatch(new_requests=[NewRequest(0, [given], 1, 0.0, 0)]))
        run_some(rng.randrange(6))
        if loads or saves:
            made.queue([*loads, *saves])
        if waits:
            made.wait_for_loads()
        before = dict(in_block)
        in_block |= {load.destination: in_slot[load.source] for load in loads}
        in_slot |= {save.destination: before[save.source] for save in saves}
        for number, block in enumerate(fill):
            in_block[block] = 100 * step + number
            Stream.current.queue.append(Work(lambda b=block, v=in_block[block]: setattr(blocks[b], "value", v)))  # type: ignore[misc]
        loaded = {load.destination for load in loads}
        for block in range(NUM_BLOCKS):
            if waits or block not in loaded:
                Stream.current.queue.append(Work(lambda b=block, v=in_block[block]: check(b, v)))  # type: ignore[misc]
        run_some(rng.randrange(6))
    made.close()
    assert not wrong
    assert all(slots[slot].value == value for slot, value in in_slot.items())


def test_an_interrupted_queue_leaves_nothing_under_way(
    copies: tuple[CudaBlockCopies, list[Memory], list[Memory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, slots = copies
    Stream.rng = random.Random(0)

    def slot(number: int) -> Memory:
        if number == 2:
            raise KeyboardInterrupt
        return slots[number]

    monkeypatch.setattr(made.host, "slot", slot)
    with pytest.raises(KeyboardInterrupt):
        made.queue([BlockTransfer("save", 0, 1), BlockTransfer("save", 1, 2)])
    assert not any(stream.queue for stream in Stream.streams)


def place(end: Any, plane: int) -> int:
    """Return the address of a plane's first row, by the rules of CUDA_MEMCPY3D."""
    return int(end.host + ((end.z + plane) * end.height + end.y) * end.pitch + end.x)


def copy_3d(pointer: Any, stream: ctypes.c_void_p) -> int:
    copy = pointer._obj
    assert ctypes.sizeof(copy) == 200 and stream.value == 7 and copy.height == 1
    assert all(end.memory_type == 1 for end in (copy.source, copy.destination))
    for plane in range(copy.depth):
        ctypes.memmove(place(copy.destination, plane), place(copy.source, plane), copy.width)
    return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver, and a stream of the number 7."""
    driver = SimpleNamespace(cuMemcpy3DAsync_v2=copy_3d)
    monkeypatch.setattr(device, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return driver


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_rows_go_where_they_belong(driver: SimpleNamespace, dtype: torch.dtype) -> None:
    blocks = torch.arange(3 * 5 * 4).to(dtype).view(3, 5, 4)
    content, before = torch.zeros(3, 4, dtype=dtype), blocks.clone()
    host_blocks.copy_rows(content, blocks[:, 2])
    assert torch.equal(content, before[:, 2])
    host_blocks.copy_rows(blocks[:, 4], content)
    before[:, 4] = before[:, 2]
    assert torch.equal(blocks, before)


def test_a_refusal_is_an_error(driver: SimpleNamespace) -> None:
    driver.cuMemcpy3DAsync_v2 = lambda *_: 700
    with pytest.raises(RuntimeError, match="cuMemcpy3DAsync_v2 failed with CUDA error 700 on cuda:1"):
        host_blocks.copy_rows(torch.zeros(2, 3), torch.zeros(2, 3))
