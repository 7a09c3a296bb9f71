"""Inputs and outputs of `nanovllm run`, and command `nanovllm merge`, which joins outputs of shards.

An answer begins with its line number, the digest of its run (the model and the flags that affect answers) and the
digest of its request (the line's bytes): all that a later run reads. Results are appended, one per line. During a run,
a line whose request changed or failed may have an older result above its newest one; at the end one result of each
line remains.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.compression import compr
from fsspec.utils import infer_compression

from nanovllm.config import Config
from nanovllm.utils.flags import CommandParser, user_errors
from nanovllm.utils.remote import filesystem, is_url, storage_errors

# The first fields of an answer.
_HEADER = re.compile(rb'\{"line": (\d{1,15}), "run": "([0-9a-f]{16})", "request": "([0-9a-f]{16})"')
_START = b'{"line": '
# Settings that affect answers; others affect only speed, or which lines fail.
_SETTINGS = (
    "revision", "dtype", "load_format", "model_impl", "quantization", "kv_cache_dtype", "logprobs_mode", "seed",
)  # fmt: skip
# What begins like this is not JSON Lines: an array, or zstd where no package decompresses it.
_NO_LINES = (b"[", b"\x28\xb5\x2f\xfd")


class UnreadableInputError(ValueError):
    """The input is not JSON lines."""


def request_digest(line: bytes) -> int:
    """Return a 64-bit digest of a line; 0 only for a blank line."""
    text = line.strip()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") or 1 if text else 0


def run_digest(config: Config, defaults: Mapping[str, Any]) -> str:
    """Return a digest of all that affects answers except the line: settings, and default sampling parameters."""
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    settings = [model, *(getattr(config, name) for name in _SETTINGS)]
    text = json.dumps([settings, dict(defaults)], sort_keys=True, default=asdict)
    return blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class LineShard:
    """Shard `index`, from 0, of `count` that together cover an input of `num_lines`.

    It is a stretch of the input, or if `num_lines` is None every `count`th line.
    """

    index: int = 0
    count: int = 1
    num_lines: int | None = None

    @classmethod
    def parse(cls, text: str) -> LineShard:
        """Parse `index/count`, or raise ValueError."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None:
            raise ValueError(f"a shard is an index and the number of shards, such as 0/4, not {text!r:.80}")
        index, count = map(int, found.groups())
        if index >= count:
            raise ValueError(f"shard {text} is out of range: the first of {count} is 0, and the last {count - 1}")
        return cls(index, count)

    def takes(self, number: int) -> bool:
        """Return whether a line, counted from 1, belongs to this shard."""
        if self.num_lines is None:
            return (number - 1) % self.count == self.index
        return (number - 1) * self.count // self.num_lines == self.index


WHOLE = LineShard()
"""The shard of all lines."""


class AnsweredRequests:
    """The digests of answered requests by line number, in 8 bytes per line, so that files larger than memory work.

    Attributes: `num_lines` of the input, and `num_unchanged` and `num_changed` ones among them, so far; and `num_gone`
    answers whose line is blank or gone.
    """

    def __init__(self) -> None:
        self._digests = array("Q")
        self.num_lines = self.num_unchanged = self.num_changed = self.num_gone = 0

    def __len__(self) -> int:
        return len(self._digests) - self._digests.count(0)

    def __getitem__(self, number: int) -> int:
        """Return the digest of a line's answered request; 0 if there is none."""
        return self._digests[number] if number < len(self._digests) else 0

    def add(self, number: int, digest: int) -> None:
        """Record the newest result of a line; a digest of 0 means a failure."""
        missing = number + 1 - len(self._digests)
        if missing > 0 and digest:
            self._digests.frombytes(bytes(missing * self._digests.itemsize))
        if number < len(self._digests):
            self._digests[number] = digest

    def check(self, number: int, digest: int) -> bool:
        """Return whether a line is blank or has a valid answer, count it, and forget an invalid answer."""
        answered = self[number]
        if answered == digest:
            self.num_unchanged += digest != 0
            return True
        if answered:
            self._digests[number] = 0
            self.num_changed += digest != 0
            self.num_gone += digest == 0
        return digest == 0

    def require_shard(self, shard: LineShard) -> None:
        """Raise ValueError if an answered line belongs to another shard."""
        if any(digest and not shard.takes(number) for number, digest in enumerate(self._digests)):
            raise ValueError("the output has answers of another shard: give another output, or --overwrite")

    def unanswered(self, lines: Iterable[bytes], shard: LineShard = WHOLE) -> Iterator[tuple[int, int, bytes]]:
        """Yield the shard's lines that are neither blank nor answered, with number, from 1, and digest."""
        for number, line in enumerate(lines, 1):
            self.num_lines = number
            if shard.takes(number):
                digest = request_digest(line)
                if not self.check(number, digest):
                    yield number, digest, line

    def forget_rest(self) -> None:
        """Forget the answers to lines after the input's last line."""
        before = len(self)
        del self._digests[self.num_lines + 1 :]
        self.num_gone += before - len(self)


class InputFile:
    """An input: a local file, one that fsspec opens, or the standard input for "-".

    OSError if it cannot be read, UnreadableInputError if it is not JSON lines.

    Attributes:
        is_stream: whether it is not a regular file: it may be slow, and may end because its writer was killed.
        lines: its lines. A file's first one is read at once, a stream's may arrive late.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_stream = path == "-" or (not is_url(path) and os.path.exists(path) and not os.path.isfile(path))
        if self.is_stream:
            self.lines = read_lines(_open(path), "the standard input" if path == "-" else path)
        else:
            next(self.lines_again(), None)
            self.lines = self.lines_again()

    def is_same_file(self, path: str) -> bool:
        """Return whether a path is this input."""
        if is_url(self.path) or not os.path.isfile(path):
            return False
        return os.path.samestat(os.stat(0 if self.path == "-" else self.path), os.stat(path))

    def count_unanswered(self, answered: AnsweredRequests, shard: LineShard) -> int | None:
        """Return the number of lines to answer; None for a stream, which cannot be read twice."""
        if self.is_stream:
            return None
        lines = enumerate(self.lines_again(), 1)
        return sum(shard.takes(number) and request_digest(line) not in (0, answered[number]) for number, line in lines)

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


def read_lines(file: Any, name: str) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed according to its name, without a byte order mark.

    OSError or UnreadableInputError.
    """
    try:
        opened = compr[infer_compression(name)](file, mode="rb")
        reader = opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(opened)
        if reader.peek(1).startswith(codecs.BOM_UTF8):
            reader.read(len(codecs.BOM_UTF8))
        head = reader.peek(1).lstrip()
        if b"\0" in head or head.startswith(_NO_LINES):
            raise UnreadableInputError(f"{name} is not JSON Lines, one object a line: it begins with {head[:20]!r}")
        yield from reader
    except UnreadableInputError:
        raise
    except Exception as error:
        raise OSError(f"{name} cannot be read: {error}") from error


class StoredResult(NamedTuple):
    """A line of an output: an answer with its line number, from 1, or a failure, whose run is None and request 0."""

    number: int
    run: str | None
    request: int
    text: bytes


def _stored_result(line: bytes) -> StoredResult | None:
    """Parse a line of an output; None if it is no result."""
    if match := _HEADER.match(line):
        return StoredResult(int(match[1]), match[2].decode(), int(match[3], 16), line)
    try:
        record = json.loads(line) if line.startswith(_START) else {}
    except ValueError:
        return None
    number = record.get("line")
    if record.get("error") is not None and isinstance(number, int) and number > 0:
        return StoredResult(number, None, 0, line)
    return None


def stored_results(lines: Iterable[bytes], path: str) -> Iterator[StoredResult]:
    """Yield the results in an output's lines, except an incomplete last one; ValueError if a line is not a result."""
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") and _START.startswith(line[: len(_START)]):
            return
        if (result := _stored_result(line)) is None:
            raise ValueError(f"{path} holds something else than results, in line {number}: give another output")
        yield result


def check_run(result: StoredResult, run: str, path: str) -> None:
    """Raise ValueError if a result is another run's answer."""
    if result.run not in (None, run):
        raise ValueError(
            f"{path} has answers of another model or with other parameters: repeat those, give another output, or "
            "start anew with --overwrite"
        )


class ResultFile:
    """Appends results to a file, which is created if missing, or writes them to a stream ("-": the standard output).

    A compressed output, or one opened by fsspec, is written as a whole when the run ends or is interrupted; until then
    its results are in a temporary file. A pipe, a terminal or another device, `is_stream`, cannot be resumed. OSError
    if the file cannot be opened, ValueError if another run writes to it.
    """

    def __init__(self, path: str) -> None:
        self.answered = AnsweredRequests()
        self.is_stream = path == "-" or Path(path).is_fifo() or Path(path).is_char_device()
        # The final destination of the results; None if they are written there directly.
        self._copied_to = path if is_url(path) or infer_compression(path) else None
        self._path = _copy_of(path) if self._copied_to else path
        # Size of the results of earlier runs.
        self._num_old = self._old_size = 0
        mode = "wb" if self.is_stream else "a+b"
        self._file: Any = open(1 if path == "-" else self._path, mode, closefd=path != "-")  # noqa: SIM115
        if not self.is_stream:
            _lock(self._file, path, self._path)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *error: object) -> None:
        with _named(self._path):
            self._file.close()
        if self._copied_to:
            shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    def load(self, run: str) -> None:
        """Read the answered requests, without an incomplete last line; ValueError for results of another run."""
        if self.is_stream:
            return
        self._file.seek(0)
        path = self._copied_to or self._path
        for result in stored_results(self._file, path):
            check_run(result, run, path)
            self.answered.add(result.number, result.request)
            self._num_old += 1
            self._old_size += len(result.text)
        self._file.truncate(self._old_size)

    def clear(self) -> None:
        """Remove all results."""
        if not self.is_stream:
            self._file.truncate(0)

    def write(self, lines: list[bytes]) -> None:
        """Append results."""
        with _named(self._path):
            self._file.write(b"".join(lines))
            # If the process is killed, lines that are not in the file are answered again.
            self._file.flush()

    def finish(self) -> None:
        """Keep all results of this run and the valid older answers; nothing can be written afterwards."""
        if len(self.answered) != self._num_old:
            # A kill leaves the temporary file behind, and the resuming run overwrites it.
            with _replaced(os.path.realpath(self._path)) as file:
                file.writelines(self._kept_lines())
                shutil.copymode(self._path, file.name)
        if self._copied_to:
            with open(self._path, "rb") as results, whole_file(self._copied_to) as file:
                shutil.copyfileobj(results, file)

    def _kept_lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        position = 0
        for line in self._file:
            position += len(line)
            if position > self._old_size:
                yield line
            # After an interrupt, another thread may still compare the input: an answer forgotten meanwhile may or may
            # not be kept, and the resuming run compares again.
            elif (old := _stored_result(line)) and old.request and self.answered[old.number] == old.request:
                self.answered.add(old.number, 0)
                yield line
        if sys.platform == "win32":
            # It cannot replace an open file.
            self._file.close()


@contextmanager
def whole_file(path: str) -> Iterator[Any]:
    """Open a file for atomic writing, compressed according to its name; StorageError if that fails."""
    files, found = filesystem(path)
    compression = infer_compression(path)
    with storage_errors(path), ExitStack() as stack:
        if is_url(path):
            stack.enter_context(files.transaction)
            file = stack.enter_context(files.open(found, "wb"))
        else:
            file = stack.enter_context(_replaced(path))
        yield file if compression is None else stack.enter_context(compr[compression](file, mode="wb"))


@contextmanager
def _replaced(path: str) -> Iterator[Any]:
    """Open a temporary file that replaces another one unless the `with` block raises."""
    whole = Path(f"{path}.unfinished")
    try:
        with whole.open("wb") as file:
            yield file
        # Opened again, since zstd's writer closes what it writes to.
        with whole.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


def _copy_of(path: str) -> str:
    """Return a temporary file with the decompressed results of an output; empty if it does not exist."""
    copy = Path(tempfile.mkdtemp(prefix="nanovllm-results-"), "results.jsonl")
    with copy.open("wb") as file:
        file.writelines(InputFile(path).lines if _exists(path) else ())
    return str(copy)


def _exists(path: str) -> bool:
    files, found = filesystem(path)
    with storage_errors(path):
        return bool(files.exists(found))


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add a file's name to errors: some of the system's, as for a full disk, lack it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _lock(file: Any, path: str, local: str) -> None:
    """Lock an output in a local file until it is closed, since two runs would write the same lines."""
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path} is being written by another run") from error
    except OSError as error:
        # Some network file systems do not support locks.
        warnings.warn(f"{path} cannot be locked ({error}): see that no other run writes to it", stacklevel=2)
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(local)):
        raise ValueError(f"{path} was being written by another run, which has replaced it")


def _read_shards(paths: Sequence[str]) -> Iterator[tuple[str, StoredResult]]:
    for path in paths:
        for result in stored_results(InputFile(path).lines, path):
            yield path, result


def _load_shards(paths: Sequence[str]) -> tuple[AnsweredRequests, set[int]]:
    """Return the answered requests, and the lines with an error and no answer; ValueError if they do not match."""
    answered, failed, run = AnsweredRequests(), set[int](), ""
    for path, result in _read_shards(paths):
        if result.run is None:
            failed.add(result.number)
            continue
        run = run or result.run
        check_run(result, run, path)
        if answered[result.number]:
            raise ValueError(f"line {result.number} is answered twice, the second time in {path}")
        answered.add(result.number, result.request)
    return answered, {number for number in failed if not answered[number]}


def _require_complete(source: InputFile, answered: AnsweredRequests, failed: set[int]) -> None:
    """Raise ValueError if a line of the input has no result, or a result belongs to another line."""
    for number, _, _ in answered.unanswered(source.lines):
        if number not in failed:
            missing = "has no result: its shard has not run to its end"
            problem = "has changed since it was answered" if answered.num_changed else missing
            raise ValueError(f"line {number} of {source.path} {problem}")
    answered.forget_rest()
    num_gone = answered.num_gone + sum(number > answered.num_lines for number in failed)
    if num_gone:
        raise ValueError(f"there are results of {num_gone} lines that are blank or gone in {source.path}")


def _merged(paths: Sequence[str], failed: set[int]) -> Iterator[bytes]:
    """Yield the answers, and one error for each failed line."""
    left = set(failed)
    for _, result in _read_shards(paths):
        if result.run is not None or result.number in left:
            left.discard(result.number)
            yield result.text


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a line failed."""
    parser = CommandParser(
        "nanovllm merge",
        description="Join the outputs of `nanovllm run --shard`. Each line of the input must have one answer, or an "
        "error, and must not have changed since. `nanovllm run` can go on with the result.",
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="the input of the shards")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a new file")
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT", help="the file of a shard")
    options = parser.parse_args(arguments)
    with user_errors(parser):
        answered, failed = _load_shards(options.outputs)
        _require_complete(InputFile(options.input), answered, failed)
        if _exists(options.output):
            raise ValueError(f"{options.output} is there already: give another output")
        with whole_file(options.output) as file:
            file.writelines(_merged(options.outputs, failed))
    print(f"{len(answered)} lines answered, {len(failed)} failed", file=sys.stderr)
    return 1 if failed else 0
