"""Reads inputs of `nanovllm run`: JSON lines, plain or compressed, from a file, an object store or a stream."""

from __future__ import annotations

import codecs
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from nanovllm.cli.batch_output import AnsweredRequests, request_digest
from nanovllm.utils.remote import filesystem, is_url, storage_errors

# Magic bytes, and the module that decompresses; `compression.zstd` is in Python 3.14 and later.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma", b"\x28\xb5\x2f\xfd": "compression.zstd"}


class UnreadableInputError(ValueError):
    """The input is not JSON lines."""


@dataclass(frozen=True)
class Shard:
    """A share of an input's lines; all shards together cover the input.

    Attributes:
        index: the shard's index, from 0.
        count: number of shards.
        num_lines: lines of the input, for a contiguous shard; None: every `count`th line.
    """

    index: int = 0
    count: int = 1
    num_lines: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `index/count`.

        Raises:
            ValueError: the text has another form, or the index is out of range.
        """
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None:
            raise ValueError(f"a shard is an index and the number of shards, such as 0/4, not {text!r:.80}")
        index, count = map(int, found.groups())
        if index >= count:
            raise ValueError(f"shard {text} is out of range: the first of {count} is 0, and the last {count - 1}")
        return cls(index, count)

    def contiguous(self, num_lines: int) -> Shard:
        """Return the shard as contiguous lines, so that equal prefixes stay together."""
        return replace(self, num_lines=num_lines)

    def takes(self, number: int) -> bool:
        """Return whether a line, counted from 1, belongs to this shard."""
        if self.num_lines is None:
            return (number - 1) % self.count == self.index
        return (number - 1) * self.count // self.num_lines == self.index


WHOLE = Shard()
"""The shard of all lines."""


class UnansweredLines:
    """The lines of a source that are not blank and not answered yet.

    Args:
        source: an iterable of lines.
        answered: requests with an answer, which are skipped.
        shard: the shard of lines to read.

    Attributes:
        num_lines: number of the source's lines so far.
    """

    def __init__(self, source: Iterable[bytes], answered: AnsweredRequests, shard: Shard = WHOLE) -> None:
        self._source = source
        self._answered = answered
        self._shard = shard
        self.num_lines = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each line with its number, from 1, and its digest."""
        for number, line in enumerate(self._source, 1):
            self.num_lines = number
            if not self._shard.takes(number):
                continue
            digest = request_digest(line)
            if not self._answered.check(number, digest):
                yield number, digest, line


class InputFile:
    """An input file, local or opened by fsspec, or the standard input for "-".

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        is_stream: whether it is not a regular file: it may be slow, and may end because its writer was killed.
        lines: its lines. A file's first bytes are read at once, a stream's with the first line.

    Raises:
        OSError: the file cannot be read.
        UnreadableInputError: it is not JSON lines.
        ValueError: see `filesystem`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = _open(path)
        descriptor = self.fileno()
        self.is_stream = path == "-" or (descriptor is not None and not stat.S_ISREG(os.fstat(descriptor).st_mode))
        name = "the standard input" if path == "-" else path
        self.lines = _read_later(self._file, name) if self.is_stream else read_lines(self._file, name)
        if is_url(path):
            # Some file systems share one position among all readers of a file; others read ahead until it is closed.
            self._file.close()
            self.lines = self.lines_again()

    def fileno(self) -> int | None:
        """Return the open file's descriptor; None for a file opened by fsspec."""
        return None if is_url(self.path) else int(self._file.fileno())

    def count_unanswered(self, answered: AnsweredRequests, shard: Shard) -> int | None:
        """Return the number of lines to answer; None for a stream, which cannot be read twice."""
        if self.is_stream:
            return None
        lines = enumerate(self.lines_again(), 1)
        return sum(shard.takes(number) and not answered.holds(number, request_digest(line)) for number, line in lines)

    def require_unchanged(self, answered: AnsweredRequests, shard: Shard) -> None:
        """Raise ValueError if an answer belongs to a changed line, or to a line of another shard."""
        left = len(answered)
        for number, line in enumerate(self.lines_again(), 1):
            if not answered.has(number):
                continue
            if not (shard.takes(number) and answered.holds(number, request_digest(line))):
                raise ValueError(
                    f"{self.path} is not the input that the output has answers to: line {number} is another one, or "
                    "one of another shard; give another output, or start anew with --overwrite"
                )
            left -= 1
        if left:
            raise ValueError(f"{self.path} is not the input that the output has answers to: {left} lines are gone")

    def lines_again(self) -> Iterator[bytes]:
        """Read the lines again from the first one; ValueError for a stream."""
        if self.is_stream:
            raise ValueError(f"{self.path} is a stream, which cannot be read twice: give a file")
        with _open(self.path) as file:
            yield from read_lines(file, self.path)


def _open(path: str) -> Any:
    if is_url(path):
        files, found = filesystem(path)
        with storage_errors(path):
            return files.open(found, "rb")
    # Not `sys.stdin`: the interpreter acquires its lock at exit, while a thread may hold it.
    return open(0 if path == "-" else path, "rb", closefd=path != "-")


def _read_later(file: Any, name: str) -> Iterator[bytes]:
    """Read a stream's lines lazily: even its first bytes may arrive late."""
    yield from read_lines(file, name)


def read_lines(file: Any, name: str) -> Iterator[bytes]:
    """Return the lines of a file; compression is detected by its first bytes.

    Raises:
        OSError: it cannot be read, now or later.
        UnreadableInputError: it is not JSON lines.
    """
    with _reading(name):
        reader = _plain(file if isinstance(file, io.BufferedReader) else io.BufferedReader(file), name)
        head = reader.peek(1).lstrip()
    if b"\0" in head or head.startswith(b"["):
        raise UnreadableInputError(f"{name} is not JSON Lines, one object a line: it begins with {head[:20]!r}")
    return _lines(reader, name)


def _plain(reader: io.BufferedReader, name: str) -> io.BufferedReader:
    """Return a reader of a file's decompressed bytes, without a byte order mark."""
    head = reader.peek(1)
    for magic, module in _COMPRESSED.items():
        if head.startswith(magic):
            try:
                opened = import_module(module).open(reader)
            except ImportError as error:
                raise UnreadableInputError(
                    f"{name} is compressed, and this Python has no module {module}: decompress it first, such as by "
                    "zstd -d"
                ) from error
            return _plain(io.BufferedReader(opened), name)
    if head.startswith(codecs.BOM_UTF8):
        reader.read(len(codecs.BOM_UTF8))
    return reader


def _lines(reader: io.BufferedReader, name: str) -> Iterator[bytes]:
    with _reading(name):
        yield from reader


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert read errors to an OSError with the file's name; each compression module has its own errors."""
    try:
        yield
    except UnreadableInputError:
        raise
    except Exception as error:
        raise OSError(f"{name} cannot be read: {error}") from error
