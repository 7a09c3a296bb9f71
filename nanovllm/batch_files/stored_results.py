"""What a run finds in the results of an earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nanovllm.batch_files.digests import parse_header

_START = b'{"line": '


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
        ValueError: a line is no result.
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
    """Return the number of the line that a result without digests is the error of."""
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
