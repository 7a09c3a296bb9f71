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

_FLUSH_SECONDS = 0.1
"""A source so slow is passed on as it comes."""
_NUM_CHUNKS = 2


class ReadAhead(Generic[T, U]):
    """Chunks of a source, prepared in a thread, at most two ahead; close it, or use it in a `with` block.

    Args:
        source: gives items; of a list of at most one chunk no thread is started.
        prepare: makes of a chunk's items what is taken.
        size: most items of a chunk.
    """

    def __init__(self, source: Iterable[T], prepare: Callable[[list[T]], U], size: int) -> None:
        self._prepare = prepare
        self._source = source
        self._size = size
        self._is_small = isinstance(source, list) and len(source) <= size
        self._room = Semaphore(_NUM_CHUNKS)
        # Chunks; at last None, or what reading has raised.
        self._chunks: SimpleQueue[U | BaseException | None] = SimpleQueue()
        self._preparing = Lock()
        self._closed = False
        self._thread = None if self._is_small else Thread(target=self._read, name="read-ahead", daemon=True)
        self.ended = False
        if self._thread is not None:
            self._thread.start()

    def take(self, wait: bool) -> U | None:
        """Return the next chunk; None if there is none, or none yet.

        Args:
            wait: wait for it; then None means the end.

        Raises:
            BaseException: what reading the source has raised.
        """
        if self.ended:
            return None
        if isinstance(self._source, list) and self._is_small:
            self.ended = True
            return self._prepare(self._source) if self._source else None
        try:
            chunk = self._chunks.get(block=wait)
        except Empty:
            return None
        self._room.release()
        if chunk is None or isinstance(chunk, BaseException):
            self.ended = True
            if chunk is not None:
                raise chunk
        return chunk

    def close(self) -> None:
        """End the thread, at the latest with the next item of its source; from now on nothing is prepared."""
        self.ended = self._closed = True
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

    def _read(self) -> None:
        try:
            chunk: list[T] = []
            flushed = time.monotonic()
            for item in self._source:
                chunk.append(item)
                if self._closed:
                    return
                if len(chunk) >= self._size or time.monotonic() - flushed > _FLUSH_SECONDS:
                    self._pass_on(chunk)
                    chunk, flushed = [], time.monotonic()
            if chunk:
                self._pass_on(chunk)
        except BaseException as error:
            self._chunks.put(error)
        self._chunks.put(None)

    def _pass_on(self, chunk: list[T]) -> None:
        with self._preparing:
            if self._closed:
                return
            prepared = self._prepare(chunk)
        self._room.acquire()
        self._chunks.put(prepared)
