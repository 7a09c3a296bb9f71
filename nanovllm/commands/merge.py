"""`nanovllm merge`: joins the outputs of the shards of an input, if they answer each of its lines, once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nanovllm.batch_files.digests import AnsweredRequests, request_digest
from nanovllm.batch_files.inputs import InputFile
from nanovllm.batch_files.part_files import PartFolder
from nanovllm.batch_files.stored_results import StoredResult, check_run, stored_results
from nanovllm.utils.flags import CommandParser, user_errors
from nanovllm.utils.remote import filesystem, is_url, storage_errors


class ShardOutputs:
    """The results of all shards.

    Args:
        paths: of files, and of folders with parts.

    Attributes:
        answered: the answers' lines and requests; 8 bytes a line.
        failed: lines with an error and without an answer.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no result, or is answered twice, or answers are of different runs.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.answered = AnsweredRequests()
        self.failed: set[int] = set()
        run: str | None = None
        for path, result in self._read():
            if result.run is None:
                self.failed.add(result.number)
                continue
            run = run or result.run
            check_run(result, run, path)
            if self.answered.has(result.number):
                raise ValueError(f"line {result.number} is answered twice, the second time in {path}")
            self.answered.add(result.number, result.request)
        self.failed = {number for number in self.failed if not self.answered.has(number)}

    def check(self, source: InputFile) -> None:
        """Raise ValueError if a line of the input has no result, or a result is of another line."""
        num_results, number = len(self.answered) + len(self.failed), 0
        for number, line in enumerate(source.lines, 1):
            digest = request_digest(line)
            if self.answered.has(number) and not self.answered.holds(number, digest):
                raise ValueError(f"line {number} of {source.path} has changed since it was answered")
            is_there = self.answered.has(number) or number in self.failed
            if digest and not is_there:
                raise ValueError(f"line {number} of {source.path} has no result: its shard has not run to its end")
            num_results -= is_there
        if num_results:
            raise ValueError(f"there are results of {num_results} lines after the last of {source.path}, {number}")

    def results(self) -> Iterator[bytes]:
        """Yield the answers, and one error of each line that failed."""
        failed = set(self.failed)
        for _, result in self._read():
            if result.run is not None:
                yield result.text
            elif result.number in failed:
                failed.remove(result.number)
                yield result.text

    def _read(self) -> Iterator[tuple[str, StoredResult]]:
        for path in self._paths:
            for name, lines in _files(path):
                for result in stored_results(lines, name):
                    yield name, result


def _files(path: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the names of an output's files and their lines."""
    if not (is_url(path) or os.path.isdir(path)):
        with open(path, "rb") as file:
            yield path, file
        return
    folder = PartFolder(path)
    names = folder.names()
    if not names:
        raise ValueError(f"{path} has no parts of results")
    for name in names:
        yield f"{path}/{name}", folder.read(name)


def _write(path: str, outputs: ShardOutputs) -> None:
    """Write the results to a new file, which is there in whole or not at all."""
    files, found = filesystem(path)
    with storage_errors(path):
        is_there = files.exists(found)
    if is_there:
        raise ValueError(f"{path} is there already: give another output")
    with storage_errors(path), ExitStack() as stack:
        if is_url(path):
            stack.enter_context(files.transaction)
            file: Any = files.open(found, "wb")
            stack.callback(file.close)
        else:
            # A failure leaves nothing at the path, and a kill a file of another name.
            whole = Path(f"{path}.merging")
            stack.callback(whole.unlink, missing_ok=True)
            file = stack.enter_context(whole.open("wb"))
        file.writelines(outputs.results())
        if not is_url(path):
            file.flush()
            os.fsync(file.fileno())
            os.replace(whole, path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a line has failed."""
    parser = CommandParser(
        "nanovllm merge",
        description="Join the outputs of `nanovllm run --shard` or `--part-lines`. Each line of the input must have "
        "one answer, or an error, and must not have changed since. `nanovllm run` can go on with the result.",
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="the input of the shards")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a new file")
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT", help="a file, or a folder of parts")
    options = parser.parse_args(arguments)
    with user_errors(parser):
        outputs = ShardOutputs(options.outputs)
        outputs.check(InputFile(options.input))
        _write(options.output, outputs)
    print(f"{len(outputs.answered)} lines answered, {len(outputs.failed)} failed", file=sys.stderr)
    return 1 if outputs.failed else 0
