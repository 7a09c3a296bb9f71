"""The output of a run as files that are written once, each as a whole, such as an object store takes them.

A kill loses the results that no part has yet; the run that goes on answers their lines again. A line that failed, and
did not when it was tried again, has its error in an earlier part than its answer.
"""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

from nanovllm.batch_files.digests import AnsweredRequests
from nanovllm.batch_files.result_file import named
from nanovllm.batch_files.shards import Shard
from nanovllm.batch_files.stored_results import check_run, stored_results
from nanovllm.utils.remote import filesystem, storage_errors

PART_LINES = 10_000
"""Lines of a part if nobody says how many."""
_NAME = re.compile(r"(\d{5,9})-of-(\d{5,9})-(\d{6,9})\.jsonl(\.gz)?")


class PartFolder:
    """The parts of results in a folder, local or an object store's.

    Args:
        path: of the folder, which need not exist.

    Raises:
        ValueError: see `filesystem`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, self._root = filesystem(path)
        # `file://` is, too.
        self._is_local = "file" in self._files.protocol

    def names(self) -> list[str]:
        """Return the names of all parts, those of a shard in the order in which they were written."""
        # Object stores' listings are cached.
        self._files.invalidate_cache()
        paths: list[str] = []
        with storage_errors(self.path), suppress(FileNotFoundError):
            paths = self._files.ls(self._root, detail=False)
        names = (path.rpartition("/")[2] for path in paths)
        return sorted(name for name in names if _NAME.fullmatch(name))

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the lines of a part."""
        with storage_errors(f"{self.path}/{name}"), self._files.open(f"{self._root}/{name}", "rb") as file:
            yield from gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file

    def create(self, name: str, content: bytes) -> None:
        """Write a part, in whole or not at all.

        Raises:
            FileExistsError: it is there already.
        """
        path = f"{self._root}/{name}"
        if self._is_local:
            _create_file(path, content)
            return
        with storage_errors(f"{self.path}/{name}"):
            self._files.pipe_file(path, content, mode="create")

    def remove(self, name: str) -> None:
        """Remove a part."""
        with storage_errors(f"{self.path}/{name}"):
            self._files.rm_file(f"{self._root}/{name}")


class PartFiles:
    """Collects results and writes them to parts of a folder; all shards of an input may write to the same one.

    Args:
        path: of the folder.
        shard: whose results they are.
        part_lines: results in a part; the last one of a run has fewer.
        is_compressed: whether parts are compressed by gzip.

    Attributes:
        is_stream: whether nobody can read again what is written, which is never so.
        answered: requests with an answer in a part.

    Raises:
        ValueError: see `filesystem`.
    """

    is_stream = False

    def __init__(self, path: str, shard: Shard, part_lines: int = PART_LINES, is_compressed: bool = False) -> None:
        if part_lines < 1:
            raise ValueError(f"part_lines must be at least 1, not {part_lines}")
        self.answered = AnsweredRequests()
        self._folder = PartFolder(path)
        self._shard = shard
        self._part_lines = part_lines
        self._suffix = ".jsonl.gz" if is_compressed else ".jsonl"
        self._next = 0
        self._lines: list[bytes] = []

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def is_file(self, descriptor: int | None) -> bool:
        """Return False: no input is a part."""
        return False

    def load(self, run: str) -> None:
        """Find the requests that have an answer in a part of this shard.

        Args:
            run: digest of this run.

        Raises:
            ValueError: parts have answers of another run or of another number of shards, or are none of results.
        """
        for name in self._own_names():
            path = f"{self._folder.path}/{name}"
            for result in stored_results(self._folder.read(name), path):
                check_run(result, run, path)
                # An error is of an earlier part than the answer.
                if result.request:
                    self.answered.add(result.number, result.request)

    def clear(self) -> None:
        """Remove the parts of this shard."""
        for name in self._own_names():
            self._folder.remove(name)
        self._next = 0

    def write(self, lines: list[bytes]) -> None:
        """Take results, and write each part that is full."""
        self._lines += lines
        while len(self._lines) >= self._part_lines:
            self._write_part(self._part_lines)

    def finish(self) -> None:
        """Write what is in no part yet."""
        if self._lines:
            self._write_part(len(self._lines))

    def _write_part(self, num_lines: int) -> None:
        # Of a part that fails nobody knows whether it is there, so nothing is written after it: the next run looks.
        lines, self._lines = self._lines, []
        content = b"".join(lines[:num_lines])
        name = f"{self._prefix}-{self._next:06d}{self._suffix}"
        self._folder.create(name, gzip.compress(content) if self._suffix.endswith(".gz") else content)
        self._lines = lines[num_lines:]
        self._next += 1

    @property
    def _prefix(self) -> str:
        return f"{self._shard.index:05d}-of-{self._shard.count:05d}"

    def _own_names(self) -> list[str]:
        names = []
        for name in self._folder.names():
            index, count, number = map(int, name.split(".")[0].replace("-of-", "-").split("-"))
            if count != self._shard.count:
                raise ValueError(
                    f"{self._folder.path} has parts of {count} shards, such as {name}: give another output"
                )
            if index == self._shard.index:
                names.append(name)
                self._next = max(self._next, number + 1)
        return names


def _create_file(path: str, content: bytes) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with named(path), tempfile.NamedTemporaryFile(dir=folder, prefix=".part-") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        # Unlike a rename it replaces nothing.
        os.link(file.name, path)
        # As those of other files are.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)
