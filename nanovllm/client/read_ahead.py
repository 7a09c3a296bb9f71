"""Reads a source in a thread of its own, and prepares what it gives in chunks, ahead of who takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Lock, Semaphore, Thread
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

_NUM_CHUNKS = 2
_FIRST_SIZE = 128
"""Most items of the first chunk, for which the device waits."""
_PATIENCE_SECONDS = 0.05
"""How long who takes chunks waits for a full one, of a source that is slow or waits itself for what was taken."""


class ReadAhead(Generic[T, U]):
    """Chunks of a source, prepared in a thread, at most two ahead; close it, or use it in a `with` block.

    Args:
        source: gives items; of a list of at most one chunk no thread is started.
        prepare: makes of a chunk's items what is taken.
        size: most items of a chunk; the first has fewer.
    """

    def __init__(self, source: Iterable[T], prepare: Callable[[list[T]], U], size: int) -> None:
        self._prepare = prepare
        self._closed = self._ended = False
        # All there is, if no thread is started.
        self._small = source if isinstance(source, list) and len(source) <= size else None
        if self._small is None:
            self._start(source, size)

    def _start(self, source: Iterable[T], size: int) -> None:
        self._source = source
        self._size = min(size, _FIRST_SIZE)
        self._later_size = size
        # Read, and not prepared yet; and since when there is any.
        self._items: list[T] = []
        self._since = 0.0
        self._lock = Lock()
        # Chunks; at last None, or what reading has raised.
        self._chunks: SimpleQueue[U | BaseException | None] = SimpleQueue()
        self._room = Semaphore(_NUM_CHUNKS)
        self._preparing = Lock()
        Thread(target=self._read, name="read-ahead", daemon=True).start()

    def take(self, wait: bool) -> U | None:
        """Return the next chunk; None if there is none, or none yet.

        Args:
            wait: wait for it; then None means the end.

        Raises:
            BaseException: what reading the source has raised.
        """
        if self._small is not None:
            items, self._small = self._small, []
            return self._prepare(items) if items else None
        while not self._ended:
            try:
                chunk = self._chunks.get(block=wait, timeout=_PATIENCE_SECONDS)
            except Empty:
                if items := self._take_items():
                    return self._prepare(items)
                if wait:
                    continue
                return None
            self._room.release()
            if isinstance(chunk, BaseException):
                self._ended = True
                raise chunk
            self._ended = chunk is None
            return chunk
        return None

    def close(self) -> None:
        """End the thread, at the latest with the next item of its source; from now on nothing is prepared."""
        self._closed = self._ended = True
        if self._small is not None:
            return
        self._room.release()
        # The interpreter may end next, and must not end a thread in a tokenizer's native code.
        with self._preparing:
            pass

    def __enter__(self) -> ReadAhead[T, U]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_items(self) -> list[T]:
        """Return what has been read and waits for the rest of its chunk, if it has for some time."""
        with self._lock:
            if not self._items or time.monotonic() - self._since < _PATIENCE_SECONDS:
                return []
            items, self._items = self._items, []
            return items

    def _read(self) -> None:
        try:
            for item in self._source:
                if self._closed:
                    return
                with self._lock:
                    if not self._items:
                        self._since = time.monotonic()
                    self._items.append(item)
                    is_full = len(self._items) >= self._size
                if is_full:
                    self._pass_on()
                    self._size = self._later_size
            self._pass_on()
        except BaseException as error:
            self._chunks.put(error)
        self._chunks.put(None)

    def _pass_on(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        with self._preparing:
            if self._closed or not items:
                return
            chunk = self._prepare(items)
        self._room.acquire()
        self._chunks.put(chunk)
