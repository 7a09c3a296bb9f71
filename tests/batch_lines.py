"""Lines of batch files, and the command that answers them, on the bundled checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

from tests.forked_command import ForkedPopen

ROOT = Path(__file__).parents[1]
ENGINE = ["--device", "cpu", "--max-model-len", "256", "--num-kvcache-blocks", "40", "--kvcache-block-size", "16"]
INTRODUCTION = [{"role": "user", "content": "introduce yourself"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RUN = "0123456789abcdef"


def encode(lines: list[Any]) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]


def openai(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": {"model": "gpt", **body}}


def lines_of_every_kind() -> list[Any]:
    """Return forty lines, with answers of 1 to 10 tokens."""
    rng, lines = Random(0), list[Any]()
    kinds: list[Any]
    for i in range(40):
        tokens: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 10), "ignore_eos": True}
        kinds = [
            {"prompt": f"{i} + 1 =", **tokens, "id": i},
            {"messages": [{"role": "user", "content": f"sort {i} 3 7"}], **tokens},
            openai(CHAT, messages=INTRODUCTION, **tokens),
            openai(TEXT, prompt=f"{i}", **tokens),
            {"prompt": "sampled", "max_tokens": 8, "temperature": 1},
            b"bad\n",
            b"\n",
        ]
        lines.append(rng.choice(kinds))
    return lines


def answered_line(number: int, request: int, run: str = RUN) -> bytes:
    """Return a result of a run, for a request with this digest."""
    return b'{"line": %d, "run": "%s", "request": "%016x", "outputs": []}\n' % (number, run.encode(), request)


def results_of(path: Path) -> dict[int, Any]:
    """Return the results of a run by line number; there is one of each line."""
    results = [json.loads(line) for line in path.read_bytes().splitlines()]
    for result in results:
        # The time of an answer is all that differs between two runs.
        (result.get("response") or {"body": {}})["body"].pop("created", None)
    assert len({result["line"] for result in results}) == len(results)
    return {result["line"]: result for result in results}


def command(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return ForkedPopen([*arguments], **options)
