"""Writes outputs of `nanovllm run`, which a later run can resume after a kill.

An answer begins with its line number, the digest of its run (the model and the flags that affect answers) and the
digest of its request (the line's bytes): all that a later run reads. Results are appended, one per line. During a run,
a line whose request changed or failed may have an older result above its newest one; at the end one result of each
line remains.
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
# Settings that affect answers; others affect only speed, or which lines fail.
_SETTINGS = (
    "revision", "dtype", "load_format", "model_impl", "quantization", "kv_cache_dtype", "logprobs_mode", "seed",
)  # fmt: skip
_START = b'{"line": '
_COMPRESSED: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
"""Modules that compress outputs, by file extension."""


def request_digest(line: bytes) -> int:
    """Return a 64-bit digest of a line; 0 only for a blank line."""
    text = line.strip()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") or 1 if text else 0


def run_digest(config: Config, defaults: Mapping[str, Any]) -> str:
    """Return a digest of everything that affects answers, except the line itself.

    Args:
        config: the engine's settings.
        defaults: default sampling parameters.
    """
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    settings = [model, *(getattr(config, name) for name in _SETTINGS)]
    text = json.dumps([settings, dict(defaults)], sort_keys=True, default=asdict)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def answer_header(line: int, run: str, request: int) -> dict[str, Any]:
    """Return the first fields of an answer."""
    return {"line": line, "run": run, "request": f"{request:016x}"}


def parse_header(result: bytes) -> tuple[int, str, int] | None:
    """Return the line's number, the run's digest and the request's digest; None if the result is not an answer."""
    match = _HEADER.match(result)
    return None if match is None else (int(match[1]), match[2].decode(), int(match[3], 16))


class AnsweredRequests:
    """The answered requests of a file, in 8 bytes per line, so that files larger than the memory work.

    Attributes:
        num_unchanged: lines so far with a valid answer.
        num_changed: lines so far that changed since they were answered.
        num_gone: answers so far whose line is blank or gone.
    """

    def __init__(self) -> None:
        # Digests by line number; 0 for no answer.
        self._digests = array("Q")
        self.num_unchanged = self.num_changed = self.num_gone = 0

    def __len__(self) -> int:
        return len(self._digests) - self._digests.count(0)

    def add(self, number: int, digest: int) -> None:
        """Record the newest result of a line; a digest of 0 means a failure."""
        missing = number + 1 - len(self._digests)
        if missing > 0 and digest:
            self._digests.frombytes(bytes(missing * self._digests.itemsize))
        if number < len(self._digests):
            self._digests[number] = digest

    def has(self, number: int) -> bool:
        """Return whether a line has an answer, valid or not."""
        return self._get(number) != 0

    def holds(self, number: int, digest: int) -> bool:
        """Return whether a line is blank or has a valid answer."""
        return digest == 0 or self._get(number) == digest

    def check(self, number: int, digest: int) -> bool:
        """Return `holds`, count the line, and forget an invalid answer."""
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
        """Forget the answers to lines after the input's last line."""
        before = len(self)
        del self._digests[number + 1 :]
        self.num_gone += before - len(self)

    def _get(self, number: int) -> int:
        return self._digests[number] if number < len(self._digests) else 0


class StoredResult(NamedTuple):
    """A result in an output.

    Attributes:
        number: number of its line, from 1.
        run: digest of its run; None for a failure.
        request: digest of its request; 0 for a failure.
        text: the whole line.
    """

    number: int
    run: str | None
    request: int
    text: bytes


def stored_results(lines: Iterable[bytes], path: str) -> Iterator[StoredResult]:
    """Yield the results in an output's lines, except an incomplete last one.

    Args:
        lines: lines of an output.
        path: path of the output, for messages.

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
    """Raise ValueError if a result is another run's answer."""
    if result.run not in (None, run):
        raise ValueError(
            f"{path} has answers of another model or with other parameters: repeat those, give another output, or "
            "start anew with --overwrite"
        )


def _failed_line(line: bytes, path: str, number: int) -> int:
    """Return the line number of an error, a result without digests."""
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

    A compressed output, or one opened by fsspec, is written as a whole when the run ends or is interrupted; until then
    its results are in a temporary file.

    Args:
        path: path of the file, which is created if missing.

    Attributes:
        is_stream: whether it is a pipe, a terminal or another device, which cannot be resumed.
        answered: answered requests in the file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: another run writes to it.
    """

    def __init__(self, path: str) -> None:
        self.answered = AnsweredRequests()
        self.is_stream = path == "-" or _is_stream(path)
        # The final destination of the results; None if they are written there directly.
        self._copied_to = path if is_url(path) or Path(path).suffix in _COMPRESSED else None
        self._path = _copy_of(path) if self._copied_to else path
        # Size of the results of earlier runs.
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
        """Return whether a descriptor belongs to this file; None means a file that is not local."""
        return descriptor is not None and not self.is_stream and os.path.sameopenfile(descriptor, self._file.fileno())

    def load(self, run: str) -> None:
        """Read the answered requests, and truncate an incomplete last line.

        Args:
            run: digest of this run.

        Raises:
            ValueError: the file has answers of another run, or lines that are not results.
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
        """Remove all results."""
        if not self.is_stream:
            self._file.truncate(0)

    def write(self, lines: list[bytes]) -> None:
        """Append results."""
        with named(self._path):
            self._file.write(b"".join(lines))
            # If the process is killed, lines that are not in the file are answered again.
            self._file.flush()

    def finish(self) -> None:
        """Keep all results of this run and the valid older answers; nothing can be written afterwards."""
        if len(self.answered) != self._num_old:
            path = os.path.realpath(self._path)
            # A kill leaves this file behind, and the resuming run overwrites it.
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
            # After an interrupt, another thread may still compare the input: an answer forgotten meanwhile may or may
            # not be kept, and the resuming run compares again.
            if position > self._old_size or self._still_holds(line):
                yield line

    def _still_holds(self, line: bytes) -> bool:
        header = parse_header(line)
        return header is not None and self.answered.pop(header[0], header[2])


@contextmanager
def whole_file(path: str) -> Iterator[Any]:
    """Open a file for atomic writing, compressed according to its extension.

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
    """Open a temporary file that replaces another one, which may be open, unless the `with` block raises."""
    whole = Path(temporary)
    try:
        with whole.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if open_file is not None and sys.platform == "win32":
            # Windows cannot replace an open file.
            open_file.close()
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


def _copy_of(path: str) -> str:
    """Return a temporary file with the decompressed results of an output; empty if it does not exist."""
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
    """Add a file's name to errors: some of the system's, as for a full disk, lack it."""
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
