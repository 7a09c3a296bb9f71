"""Command `nanovllm merge`: joins outputs of shards, if they answer each line of the input exactly once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from nanovllm.cli.batch_input import InputFile, read_lines
from nanovllm.cli.batch_output import (
    AnsweredRequests,
    StoredResult,
    check_run,
    request_digest,
    stored_results,
    whole_file,
)
from nanovllm.utils.flags import CommandParser, user_errors
from nanovllm.utils.remote import filesystem, is_url, storage_errors


class ShardOutputs:
    """Results of all shards.

    Args:
        paths: paths of the outputs.

    Attributes:
        answered: answered lines and their requests, in 8 bytes per line.
        failed: lines with an error and no answer.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is not a result, is answered twice, or answers are from different runs.
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
        """Raise ValueError if a line of the input has no result, or a result belongs to another line."""
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
        """Yield the answers, and one error for each failed line."""
        failed = set(self.failed)
        for _, result in self._read():
            if result.run is not None:
                yield result.text
            elif result.number in failed:
                failed.remove(result.number)
                yield result.text

    def _read(self) -> Iterator[tuple[str, StoredResult]]:
        for path in self._paths:
            files, found = filesystem(path)
            with storage_errors(path) if is_url(path) else nullcontext(), files.open(found, "rb") as file:
                for result in stored_results(read_lines(file, path), path):
                    yield path, result


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
        outputs = ShardOutputs(options.outputs)
        outputs.check(InputFile(options.input))
        files, found = filesystem(options.output)
        with storage_errors(options.output):
            is_there = files.exists(found)
        if is_there:
            raise ValueError(f"{options.output} is there already: give another output")
        with whole_file(options.output) as file:
            file.writelines(outputs.results())
    print(f"{len(outputs.answered)} lines answered, {len(outputs.failed)} failed", file=sys.stderr)
    return 1 if outputs.failed else 0
