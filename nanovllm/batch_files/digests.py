"""What an answer says about its question, so that a later run finds out whether the answer still holds.

An answer begins with the number of its line, the digest of its run (the model and the flags that set answers) and the
digest of its request (the line's bytes): all that a later run reads of it.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from nanovllm.config import Config

_HEADER = re.compile(rb'\{"line": (\d{1,15}), "run": "([0-9a-f]{16})", "request": "([0-9a-f]{16})"')
# Other settings change how fast an answer comes, or which lines fail.
_SETTINGS = (
    "revision", "dtype", "load_format", "model_impl", "quantization", "kv_cache_dtype", "logprobs_mode", "seed",
)  # fmt: skip


def request_digest(line: bytes) -> int:
    """Return 64 bits that tell a line from others in its place; 0 for a blank line alone."""
    text = line.strip()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") or 1 if text else 0


def run_digest(config: Config, defaults: Mapping[str, Any]) -> str:
    """Return what tells runs apart whose answers to the same line differ.

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
    """The requests that a file has answers to: 8 bytes a line, so that those of a file larger than the memory fit.

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
