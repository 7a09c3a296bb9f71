"""Outputs of `nanovllm run`: results that a killed run leaves behind, and a later run continues.

An answer begins with the number of its line, the digest of its run (the model and the flags that set answers) and the
digest of its request (the line's bytes): all that a later run reads of it. Results are appended, one line each. Until
a run ends, a line whose request changed or failed can have an older result above its newest one; the end leaves one
result of each line.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.utils.remote import filesystem, is_url, storage_errors

_HEADER = re.compile(rb'\{"line": (\d{1,15}), "run": "([0-9a-f]{16})", "request": "([0-9a-f]{16})"')
# Other settings change how fast an answer comes, or which lines fail.
_SETTINGS = (
    "revision", "dtype", "load_format", "model_impl", "quantization", "kv_cache_dtype", "logprobs_mode", "seed",
)  # fmt: skip
_START = b'{"line": '
_COMPRESSED: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
"""Modules that compress outputs, by the ends of their names."""


def request_digest(line: bytes) -> int:
    """Return 64 bits that tell a line from others in its place; 0 for a blank line alone."""
    text = line.strip()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") or 1 if text else 0


def run_digest(config: Config, defaults: Mapping[str, Any]) -> str:
    """Return a digest that differs between runs whose answers to the same line differ.

    Args:
        config: the engine's settings.
        defaults: sampling parameters of lines that do not say.
    """
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    settings = [model, *(getattr(config, name) for name in _SETTINGS)]
    text = json.dumps([settings, dict(defaults)], sort_keys=True, default=asdict)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def answer_header(line: int, run: str, request: int) -> dict[str, Any]:
    """Return the fields that an answer begins with."""
    return {"line": line, "run": run, "request": f"{request:016x}"}


def parse_header(result: bytes) -> tuple[int, str, int] | None:
    """Return the line's number, the run's digest and the request's digest; None if the result is no answer."""
    match = _HEADER.match(result)
    return None if match is None else (int(match[1]), match[2].decode(), int(match[3], 16))


class AnsweredRequests:
    """The requests that a file has answers to: 8 bytes a line, so that a file larger than the memory fits.

    Attributes:
        num_unchanged: lines so far whose answer holds.
        num_changed: lines so far whose answer is one to another request.
        num_gone: answers so far whose line is blank or not there any more.
    """

    def __init__(self) -> None:
        # Digests by line number; 0 where there is no answer.
        self._digests = array("Q")
        self.num_unchanged = self.num_changed = self.num_gone = 0

    def __len__(self) -> int:
        return len(self._digests) - self._digests.count(0)

    def add(self, number: int, digest: int) -> None:
        """Note the newest result of a line; a digest of 0 stands for a failure."""
        missing = number + 1 - len(self._digests)
        if missing > 0 and digest:
            self._digests.frombytes(bytes(missing * self._digests.itemsize))
        if number < len(self._digests):
            self._digests[number] = digest

    def has(self, number: int) -> bool:
        """Return whether a line has an answer, whatever its request is."""
        return self._get(number) != 0

    def holds(self, number: int, digest: int) -> bool:
        """Return whether a line is blank, or its answer holds."""
        return digest == 0 or self._get(number) == digest

    def check(self, number: int, digest: int) -> bool:
        """Return the same as `holds`, count the line, and forget an answer that does not hold."""
        answered = self._get(number)
        if answered == digest:
            self.num_unchanged += digest != 0
            return True
        if answered:
            self._digests[number] = 0
            self.num_changed += digest != 0
            self.num_gone += digest == 0
        return digest == 0

    def pop(self, number: int, digest: int) -> bool:
        """Return whether this is the line's answer, and forget it."""
        is_answer = digest != 0 and self._get(number) == digest
        if is_answer:
            self._digests[number] = 0
        return is_answer

    def forget_after(self, number: int) -> None:
        """Forget the answers to all lines after this one, which is the input's last."""
        before = len(self)
        del self._digests[number + 1 :]
        self.num_gone += before - len(self)

    def _get(self, number: int) -> int:
        return self._digests[number] if number < len(self._digests) else 0


class StoredResult(NamedTuple):
    """A result in an output.

    Attributes:
        number: of the line that it belongs to, from 1.
        run: digest of its run; None of a failure.
        request: digest of its request; 0 of a failure.
        text: the whole line.
    """

    number: int
    run: str | None
    request: int
    text: bytes


def stored_results(lines: Iterable[bytes], path: str) -> Iterator[StoredResult]:
    """Yield the results that lines hold, without what a kill has left of the last one.

    Args:
        lines: of an output.
        path: of the output, for messages.

    Raises:
        ValueError: a line is not a result.
    """
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") and _START.startswith(line[: len(_START)]):
            return
        header = parse_header(line)
        if header is None:
            yield StoredResult(_failed_line(line, path, number), None, 0, line)
        else:
            yield StoredResult(*header, line)


def check_run(result: StoredResult, run: str, path: str) -> None:
    """Raise ValueError if a result is an answer of another run."""
    if result.run not in (None, run):
        raise ValueError(
            f"{path} has answers of another model or with other parameters: repeat those, give another output, or "
            "start anew with --overwrite"
        )


def _failed_line(line: bytes, path: str, number: int) -> int:
    """Return the number of the line whose error a result without digests is."""
    try:
        result = json.loads(line) if line.startswith(_START) else {}
    except ValueError:
        result = {}
    failed = result.get("line")
    if result.get("error") is not None and isinstance(failed, int) and failed > 0:
        return failed
    if "outputs" in result or "response" in result:
        raise ValueError(
            f"{path} has answers that do not say to which request, as earlier versions wrote them: give another "
            "output, or start anew with --overwrite"
        )
    raise ValueError(f"{path} holds something else than results, in line {number}: give another output")


class ResultFile:
    """Appends results to a file, or writes them to a stream ("-" is the standard output).

    An output that fsspec opens, or that is compressed, is written in whole when the run ends or is interrupted; until
    then its results are in a temporary file.

    Args:
        path: of the file; created if there is none.

    Attributes:
        is_stream: whether it is a pipe, a terminal or another device, which has no results to go on with.
        answered: requests with an answer in the file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: another run writes to it.
    """

    def __init__(self, path: str) -> None:
        self.answered = AnsweredRequests()
        self.is_stream = path == "-" or _is_stream(path)
        # Where the results are copied to at the end; None if they are there already.
        self._copied_to = path if is_url(path) or Path(path).suffix in _COMPRESSED else None
        self._path = _copy_of(path) if self._copied_to else path
        # Results that were there before this run.
        self._num_old = self._old_size = 0
        mode = "wb" if self.is_stream else "a+b"
        file = 1 if path == "-" else self._path
        self._file: Any = open(file, mode, closefd=path != "-")  # noqa: SIM115 (see __exit__)
        if not self.is_stream:
            _lock(self._file, path, self._path)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with named(self._path):
            self._file.close()
        if self._copied_to:
            shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    def is_file(self, descriptor: int | None) -> bool:
        """Return whether a descriptor belongs to this file; None stands for a file that is not local."""
        return descriptor is not None and not self.is_stream and os.path.sameopenfile(descriptor, self._file.fileno())

    def load(self, run: str) -> None:
        """Find the requests that have an answer, and cut off what a kill left of the last line.

        Args:
            run: digest of this run.

        Raises:
            ValueError: the file has answers of another run, or holds something else than results.
        """
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
        """Remove all that the file holds."""
        if not self.is_stream:
            self._file.truncate(0)

    def write(self, lines: list[bytes]) -> None:
        """Append results."""
        with named(self._path):
            self._file.write(b"".join(lines))
            # A line that is not in the file when the process is killed is answered again.
            self._file.flush()

    def finish(self) -> None:
        """Keep of the older results the answers that hold, and all of this run's; nothing can be written then."""
        if len(self.answered) != self._num_old:
            path = os.path.realpath(self._path)
            # A kill leaves it behind, and the run that goes on writes it again.
            with _replaced(path, f"{path}.rewritten", self._file) as file:
                file.writelines(self._kept_lines())
                shutil.copymode(path, file.name)
        if self._copied_to:
            with open(self._path, "rb") as results, whole_file(self._copied_to) as file:
                shutil.copyfileobj(results, file)

    def _kept_lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        position = 0
        for line in self._file:
            position += len(line)
            # Where a run is interrupted, its input may still be read and compared: what is forgotten meanwhile is
            # kept or not, and the run that goes on compares again.
            if position > self._old_size or self._still_holds(line):
                yield line

    def _still_holds(self, line: bytes) -> bool:
        header = parse_header(line)
        return header is not None and self.answered.pop(header[0], header[2])


@contextmanager
def whole_file(path: str) -> Iterator[Any]:
    """Open a file that is there in whole or not at all; it is compressed if its name ends so.

    Raises:
        StorageError: access to the path failed.
    """
    files, found = filesystem(path)
    module = _COMPRESSED.get(Path(path).suffix)
    with storage_errors(path), ExitStack() as stack:
        if is_url(path):
            stack.enter_context(files.transaction)
            file = stack.enter_context(files.open(found, "wb"))
        else:
            file = stack.enter_context(_replaced(path, f"{path}.merging"))
        if module is not None:
            file = stack.enter_context(module.open(file, "wb"))
        yield file


@contextmanager
def _replaced(path: str, temporary: str, open_file: Any = None) -> Iterator[Any]:
    """Open a temporary file that takes the place of another one, which may be open, unless the `with` block raises."""
    whole = Path(temporary)
    try:
        with whole.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if open_file is not None and sys.platform == "win32":
            # An open file cannot be replaced there.
            open_file.close()
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


def _copy_of(path: str) -> str:
    """Return a file in a temporary folder with the decompressed results of an output, none if it is not there."""
    copy = Path(tempfile.mkdtemp(prefix="nanovllm-results-"), "results.jsonl")
    with storage_errors(path), copy.open("wb") as file:
        files, found = filesystem(path)
        if files.exists(found):
            with files.open(found, "rb") as stored:
                module = _COMPRESSED.get(Path(path).suffix)
                shutil.copyfileobj(stored if module is None else module.open(stored), file)
    return str(copy)


@contextmanager
def named(path: str) -> Iterator[None]:
    """Add a file's name to errors: the system names none if a disk is full, say."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _is_stream(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _lock(file: Any, path: str, local: str) -> None:
    """Lock an output, whose results are in a local file, until it is closed: two runs would write the same lines."""
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
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(local)):
        raise ValueError(f"{path} was being written by another run, which has replaced it")
