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
from typing import Any, BinaryIO

from nanovllm.batch_files.digests import AnsweredRequests, request_digest

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

    Attributes:
        num_lines: lines of the source so far.
    """

    def __init__(self, source: Iterable[bytes], answered: AnsweredRequests) -> None:
        self._source = source
        self._answered = answered
        self.num_lines = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Iterate over the lines, each with its number, from 1, and its digest."""
        for number, line in enumerate(self._source, 1):
            self.num_lines = number
            digest = request_digest(line)
            if not self._answered.check(number, digest):
                yield number, digest, line


class InputFile:
    """A file, or the standard input for "-".

    Args:
        path: of the file.

    Attributes:
        is_stream: whether it is no regular file: it may be slow, and may end because its writer was killed.
        lines: its lines. The first bytes of a file are read at once, those of a stream with the first line.

    Raises:
        OSError: the file cannot be read.
        UnreadableInputError: it is of a kind that is not read.
    """

    def __init__(self, path: str) -> None:
        # Not `sys.stdin`, whose lock the interpreter wants at its end, while a thread may hold it.
        self._file = open(0 if path == "-" else path, "rb", closefd=path != "-")  # noqa: SIM115 (stays open)
        self.is_stream = path == "-" or not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._path = path
        name = "the standard input" if path == "-" else path
        self.lines = _read_later(self._file, name) if self.is_stream else _read_lines(self._file, name)

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._file.fileno()

    def count_unanswered(self, answered: AnsweredRequests) -> int | None:
        """Return how many lines are to be answered; None of a stream, which cannot be read twice."""
        if self.is_stream:
            return None
        with open(self._path, "rb") as file:
            lines = enumerate(_read_lines(file, self._path), 1)
            return sum(not answered.holds(number, request_digest(line)) for number, line in lines)


class _Sniffed(io.RawIOBase):
    """A source whose first bytes can be looked at before they are read; all its errors are an OSError."""

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name
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
            chunk: bytes = self._source.read1(size)
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


def _read_later(file: BinaryIO, name: str) -> Iterator[bytes]:
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
