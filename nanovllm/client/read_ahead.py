"""Prefetches an iterable in chunks, and prepares them, on a background thread."""

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
"""Longest wait for a full chunk, since a source may be slow or may itself wait for earlier results."""


class ReadAhead(Generic[T, U]):
    """Chunks of a source, prepared in a thread, at most two ahead; close it, or use it in a `with` block.

    Args:
        source: yields items; a list of at most one chunk needs no thread.
        prepare: turns a chunk's items into the value that `take` returns.
        size: most items of a chunk; the first has fewer.
    """

    def __init__(self, source: Iterable[T], prepare: Callable[[list[T]], U], size: int) -> None:
        self._prepare = prepare
        self._closed = self._ended = False
        # The whole source, if no thread is started.
        self._small = source if isinstance(source, list) and len(source) <= size else None
        if self._small is None:
            self._start(source, size)

    def _start(self, source: Iterable[T], size: int) -> None:
        self._source = source
        self._size = min(size, _FIRST_SIZE)
        self._later_size = size
        # Items read but not prepared yet, and the time of the oldest.
        self._items: list[T] = []
        self._since = 0.0
        self._lock = Lock()
        # Chunks; at the end None, or the error of the source.
        self._chunks: SimpleQueue[U | BaseException | None] = SimpleQueue()
        self._room = Semaphore(_NUM_CHUNKS)
        self._preparing = Lock()
        Thread(target=self._read, name="read-ahead", daemon=True).start()

    def take(self, wait: bool) -> U | None:
        """Return the next chunk; None at the end, or if it is not ready.

        Args:
            wait: wait for it; then None means the end.

        Raises:
            BaseException: the error of the source.
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
        """End the thread, at the latest with the next item of its source; nothing is prepared from now on."""
        self._closed = self._ended = True
        if self._small is not None:
            return
        self._room.release()
        # The interpreter may exit next, and must not kill a thread in a tokenizer's native code.
        with self._preparing:
            pass

    def __enter__(self) -> ReadAhead[T, U]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_items(self) -> list[T]:
        """Return the items of an incomplete chunk, if they have waited for some time."""
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
