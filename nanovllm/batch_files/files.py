"""Reading a file ahead, and writing another so that a run that is killed at any point can go on.

A result is one line, which begins with the number of the line that it answers. What a kill left of the last line is
cut off; the numbers of the others say what is done.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from queue import Empty, Queue
from threading import Thread
from typing import Any, BinaryIO

_LINE_START = b'{"line": '
_LINE_NUMBER = re.compile(re.escape(_LINE_START) + rb"(\d{1,15})[,}]")


class LineNumbers:
    """A set of line numbers, of one bit each, so that the results of a file larger than the memory fit into it."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def add(self, number: int) -> None:
        """Add a number."""
        self.count += number not in self
        self._bits.extend(bytes(max(0, number // 8 + 1 - len(self._bits))))
        self._bits[number // 8] |= 1 << number % 8

    def __contains__(self, number: int) -> bool:
        return number // 8 < len(self._bits) and bool(self._bits[number // 8] >> number % 8 & 1)


class ReadAhead:
    """Reads lines in a thread of its own, so that a slow source does not hold up the engine.

    Args:
        source: gives lines.
        skipped: numbers of lines that are not wanted.
        limit: most lines that wait for `take`.
    """

    def __init__(self, source: Iterable[bytes], skipped: LineNumbers, limit: int) -> None:
        self._source = source
        self._skipped = skipped
        # Lines; at last None, or what reading has raised.
        self._queue: Queue[tuple[int, bytes] | BaseException | None] = Queue(limit)
        self._ended = False
        Thread(target=self._read, daemon=True).start()

    def take(self, wait: bool) -> tuple[int, bytes] | None:
        """Return the next line that is not blank, and its number, from 1; None if there is none, or none yet.

        Args:
            wait: wait for a line; then None means the end.
        """
        if self._ended:
            return None
        try:
            item = self._queue.get(block=wait)
        except Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self._ended = item is None
        return item

    def _read(self) -> None:
        try:
            for number, line in enumerate(self._source, 1):
                if number not in self._skipped and line.strip():
                    self._queue.put((number, line))
        except BaseException as error:
            self._queue.put(error)
        self._queue.put(None)


def open_input(path: str) -> BinaryIO:
    """Open a file, or the standard input for "-"."""
    # Not `sys.stdin`, whose lock the interpreter wants at its end, while a thread may hold it.
    return open(0, "rb", closefd=False) if path == "-" else open(path, "rb")


def count_lines(source: BinaryIO, skipped: LineNumbers) -> int | None:
    """Return how many lines of a source are left to answer; None if it cannot be read twice, as a pipe cannot."""
    if not source.seekable():
        return None
    start = source.tell()
    count = sum(number not in skipped and bool(line.strip()) for number, line in enumerate(source, 1))
    source.seek(start)
    return count


def open_output(path: str) -> tuple[BinaryIO, LineNumbers]:
    """Open a file to append results to, or the standard output for "-"; returns also which lines have a result there.

    Raises:
        ValueError: another run writes to the file, or it holds something else than results.
    """
    done = LineNumbers()
    if path == "-":
        return open(1, "wb", closefd=False), done
    file = open(path, "a+b")  # noqa: SIM115 (the caller closes it)
    try:
        _lock(file, path)
        _find_done(file, path, done)
    except BaseException:
        file.close()
        raise
    return file, done


def _find_done(file: BinaryIO, path: str, done: LineNumbers) -> None:
    """Collect the numbers of a file's results, and cut off a last line that is not whole."""
    end = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n") and _LINE_START.startswith(line[: len(_LINE_START)]):
            break
        match = _LINE_NUMBER.match(line)
        if match is None:
            raise ValueError(f"{path} holds something else than results, in line {number}: give another output")
        done.add(int(match[1]))
        end += len(line)
    file.truncate(end)


def _lock(file: Any, path: str) -> None:
    """Lock an output until it is closed, so that two runs do not write the same lines."""
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path} is being written by another run") from error
    except OSError as error:
        # Some network file systems have no locks.
        warnings.warn(f"{path} cannot be locked ({error}): see that no other run writes to it", stacklevel=2)
