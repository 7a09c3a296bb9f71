"""The lines of an input: of a file or a stream, plain, compressed, in UTF-16, or the elements of a JSON array.

What the input is shows in its first bytes, not in its name. Anything else is refused with what it is.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from nanovllm.batch_files.digests import AnsweredRequests, request_digest
from nanovllm.batch_files.shards import WHOLE, Shard
from nanovllm.utils.remote import filesystem, is_url, storage_errors

# First bytes, and the module that reads what follows; Python has `compression.zstd` from 3.14 on.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma", b"\x28\xb5\x2f\xfd": "compression.zstd"}
# UTF-32 first: its mark begins with that of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_FOREIGN = {b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"PK\x03\x04": "a zip archive"}
_CSV_NAME = re.compile(r'\s*("[\w .-]+"|[\w .-]+)\s*')
# Of a table with one column alone.
_COLUMNS = ("prompt", "messages", "text")
_HINT = "write it as JSON Lines, such as by pandas' to_json(orient='records', lines=True)"
_SNIFFED_BYTES = 4096


class UnreadableInputError(ValueError):
    """The input is of a kind that is not read."""


class UnansweredLines:
    """The lines of a source that are not blank, and whose requests have no answer.

    Args:
        source: gives lines.
        answered: requests that are not wanted.
        shard: of the lines.

    Attributes:
        num_lines: lines of the source so far.
    """

    def __init__(self, source: Iterable[bytes], answered: AnsweredRequests, shard: Shard = WHOLE) -> None:
        self._source = source
        self._answered = answered
        self._shard = shard
        self.num_lines = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Iterate over the lines, each with its number, from 1, and its digest."""
        for number, line in enumerate(self._source, 1):
            self.num_lines = number
            if not self._shard.takes(number):
                continue
            digest = request_digest(line)
            if not self._answered.check(number, digest):
                yield number, digest, line


class InputFile:
    """A file, local or one that fsspec opens, or the standard input for "-".

    Args:
        path: of the file.

    Attributes:
        path: the same.
        is_stream: whether it is no regular file: it may be slow, and may end because its writer was killed.
        lines: its lines. The first bytes of a file are read at once, those of a stream with the first line.

    Raises:
        OSError: the file cannot be read.
        UnreadableInputError: it is of a kind that is not read.
        ValueError: see `filesystem`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = _open(path)
        descriptor = self.fileno()
        self.is_stream = path == "-" or (descriptor is not None and not stat.S_ISREG(os.fstat(descriptor).st_mode))
        name = "the standard input" if path == "-" else path
        self.lines = _read_later(self._file, name) if self.is_stream else _read_lines(self._file, name)
        if is_url(path):
            # Some file systems give one file, with one position, to all who open it; others read ahead until it closes.
            self._file.close()
            self.lines = self._lines_again()

    def fileno(self) -> int | None:
        """Return the descriptor of the open file; None of one that fsspec has opened."""
        return None if is_url(self.path) else int(self._file.fileno())

    def count_lines(self) -> int:
        """Return how many lines there are.

        Raises:
            ValueError: this is a stream, which cannot be read twice.
        """
        return sum(1 for _ in self._lines_again())

    def count_unanswered(self, answered: AnsweredRequests, shard: Shard) -> int | None:
        """Return how many lines are to be answered; None of a stream, which cannot be read twice."""
        if self.is_stream:
            return None
        lines = enumerate(self._lines_again(), 1)
        return sum(shard.takes(number) and not answered.holds(number, request_digest(line)) for number, line in lines)

    def require_unchanged(self, answered: AnsweredRequests, shard: Shard) -> None:
        """Raise ValueError if there is an answer to another request than a line's, or to a line of another shard."""
        left = len(answered)
        for number, line in enumerate(self._lines_again(), 1):
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

    def _lines_again(self) -> Iterator[bytes]:
        if self.is_stream:
            raise ValueError(f"{self.path} is a stream, which cannot be read twice: give a file")
        with _open(self.path) as file:
            yield from _read_lines(file, self.path)


def _open(path: str) -> Any:
    if is_url(path):
        files, found = filesystem(path)
        with storage_errors(path):
            return files.open(found, "rb")
    # Not `sys.stdin`, whose lock the interpreter wants at its end, while a thread may hold it.
    return open(0 if path == "-" else path, "rb", closefd=path != "-")


class _Sniffed(io.RawIOBase):
    """A source whose first bytes can be looked at before they are read; all its errors are an OSError."""

    def __init__(self, source: Any, name: str) -> None:
        # Files of fsspec have no `read1`; their `read` gives what there is of a block.
        self._read, self._name = getattr(source, "read1", None) or source.read, name
        self._pending = b""

    def sniff(self) -> bytes:
        """Return the first line that is not blank, or as much of it as tells what the source is."""
        while len(self._pending) < _SNIFFED_BYTES and b"\n" not in self._pending.lstrip():
            chunk = self._read1(_SNIFFED_BYTES)
            if not chunk:
                break
            self._pending += chunk
        self._pending = self._pending.removeprefix(codecs.BOM_UTF8)
        return self._pending[:_SNIFFED_BYTES]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._pending or self._read1(len(buffer))
        chunk, self._pending = chunk[: len(buffer)], chunk[len(buffer) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def _read1(self, size: int) -> bytes:
        try:
            chunk: bytes = self._read(size)
        # Each kind of compression has errors of its own.
        except Exception as error:
            raise OSError(f"{self._name} cannot be read: {error}") from error
        return chunk


class _Transcoder:
    """Text of another encoding as UTF-8."""

    def __init__(self, source: io.BufferedIOBase, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def read1(self, size: int) -> bytes:
        """Return the next characters, as soon as there are some; none at the end."""
        while True:
            chunk = self._source.read1(size)
            text = self._decoder.decode(chunk, final=not chunk)
            if text or not chunk:
                return text.encode()


def _read_later(file: Any, name: str) -> Iterator[bytes]:
    """Read a stream's lines, and look at none of its bytes before: they may come late."""
    yield from _read_lines(file, name)


def _read_lines(file: Any, name: str) -> Iterable[bytes]:
    sniffed = _Sniffed(file, name)
    head = sniffed.sniff()
    reader = io.BufferedReader(sniffed)
    for magic, module in _COMPRESSED.items():
        if head.startswith(magic):
            return _read_lines(_decompressed(reader, module, name), name)
    for mark, encoding in _ENCODINGS.items():
        if head.startswith(mark):
            return _read_lines(_Transcoder(reader, encoding), name)
    _refuse_foreign(head, name)
    return _array_elements(reader, name) if head.lstrip().startswith(b"[") else reader


def _decompressed(reader: io.BufferedIOBase, module: str, name: str) -> Any:
    try:
        return import_module(module).open(reader)
    except ImportError as error:
        raise UnreadableInputError(
            f"{name} is compressed, and this Python has no module {module}: decompress it first, such as by zstd -d"
        ) from error


def _refuse_foreign(head: bytes, name: str) -> None:
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise UnreadableInputError(f"{name} is {kind}, not JSON Lines: {_HINT}")
    if b"\0" in head:
        raise UnreadableInputError(f"{name} is no text, but binary data: the input is JSON Lines")
    first = head.strip().split(b"\n")[0].decode(errors="replace")
    cells = re.split("[,;\t]", first)
    if (len(cells) > 1 or first.strip('" ') in _COLUMNS) and all(map(_CSV_NAME.fullmatch, cells)):
        raise UnreadableInputError(f"{name} looks like CSV, since it begins with {first!r:.80}: {_HINT}")


def _array_elements(reader: io.BufferedIOBase, name: str) -> list[bytes]:
    try:
        elements = json.load(reader)
    except (ValueError, RecursionError) as error:
        raise UnreadableInputError(f"{name} begins as a JSON array, but is none: {error}") from error
    return [json.dumps(element).encode() for element in elements]
