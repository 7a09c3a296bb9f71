"""The output of a run that may be killed at any point and go on later.

Results are appended, one line each. Until a run ends, a line whose request changed or failed can have an older result
above its newest one; the end leaves one result of each line.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from nanovllm.batch_files.digests import AnsweredRequests, parse_header
from nanovllm.batch_files.stored_results import check_run, stored_results


class ResultFile:
    """Appends results to a file, or writes them to a stream ("-" is the standard output), which nobody reads again.

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
        self._path = path
        # Of the results that were there before this run.
        self._num_old = self._old_size = 0
        mode = "wb" if self.is_stream else "a+b"
        self._file: Any = open(1 if path == "-" else path, mode, closefd=path != "-")  # noqa: SIM115 (see __exit__)
        if not self.is_stream:
            _lock(self._file, path)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with named(self._path):
            self._file.close()

    def is_file(self, descriptor: int | None) -> bool:
        """Return whether a descriptor (None: that of no local file) is one of this file."""
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
        for result in stored_results(self._file, self._path):
            check_run(result, run, self._path)
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
        if len(self.answered) == self._num_old:
            return
        path = os.path.realpath(self._path)
        # A kill leaves it behind, and the run that goes on writes it again.
        rewritten = Path(f"{path}.rewritten")
        try:
            with rewritten.open("wb") as file:
                file.writelines(self._kept_lines())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, rewritten)
            if sys.platform == "win32":
                # An open file cannot be replaced there.
                self._file.close()
            os.replace(rewritten, path)
        except BaseException:
            rewritten.unlink(missing_ok=True)
            raise

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
def named(path: str) -> Iterator[None]:
    """Have errors name a file: of a full disk, say, the system says none."""
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
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise ValueError(f"{path} was being written by another run, which has replaced it")
